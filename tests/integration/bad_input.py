"""What a confused or hostile client sends, said in each dialect, and the shape that each dialect refuses it in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.dialects import DIALECTS

from ..harnesses.house import POLICY

LOOK = {"name": "look"}
PNG = "data:image/png;base64,"
NOT_BASE64 = "=A=="


@dataclass(frozen=True)
class Form:
    """A dialect's way to say things: `items` are entries of its history, each one a mistake but for `user`."""

    name: str
    path: str
    user: dict[str, Any]
    unknown_role: dict[str, Any]
    twins: tuple[dict[str, Any], ...]
    image: dict[str, Any]
    more: Mapping[str, Any]

    def url(self, model: str) -> str:
        return self.path.replace("{model}", model)

    def body(self, *items: Any, model: str = POLICY) -> dict[str, Any]:
        named = {} if "{model}" in self.path else {"model": model}
        return {**named, **self.more, DIALECTS[self.name].items_field: list(items)}


def _gemini(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def _message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_USE = {"type": "tool_use", "id": "c1", "input": {}, **LOOK}
_ITEM = {"type": "function_call", "call_id": "c1", "arguments": "{}", **LOOK}
_BASE64 = {"type": "base64", "media_type": "image/png", "data": NOT_BASE64}

FORMS = {
    form.name: form
    for form in (
        Form(
            name="openai_chat",
            path="/v1/chat/completions",
            user=_message("user", "hi"),
            unknown_role=_message("wizard", "hi"),
            twins=(_message("assistant", None, tool_calls=[_CHAT_CALL, _CHAT_CALL]),),
            image=_message("user", [{"type": "image_url", "image_url": {"url": PNG + NOT_BASE64}}]),
            more={},
        ),
        Form(
            name="openai_responses",
            path="/v1/responses",
            user=_message("user", "hi"),
            unknown_role=_message("wizard", "hi"),
            twins=(_ITEM, _ITEM),
            image=_message("user", [{"type": "input_image", "image_url": PNG + NOT_BASE64}]),
            more={},
        ),
        Form(
            name="anthropic",
            path="/v1/messages",
            user=_message("user", "hi"),
            unknown_role=_message("wizard", "hi"),
            twins=(_message("assistant", [_USE, _USE]), _message("user", "go on")),
            image=_message("user", [{"type": "image", "source": _BASE64}]),
            more={"max_tokens": 16},
        ),
        Form(
            name="gemini",
            path="/v1beta/models/{model}:generateContent",
            user=_gemini("user", {"text": "hi"}),
            unknown_role=_gemini("wizard", {"text": "hi"}),
            twins=(
                _gemini("model", *[{"functionCall": {"id": "c1", "args": {}, **LOOK}}] * 2),
                _gemini("user", {"text": "go on"}),
            ),
            image=_gemini("user", {"inlineData": {"mimeType": "image/png", "data": NOT_BASE64}}),
            more={},
        ),
    )
}


def mistakes(form: Form) -> dict[str, bytes]:
    """Bodies that are refused with 400, by what is wrong with them."""
    hello = json.dumps(form.body(form.user)).encode()
    assert b'"hi"' in hello
    items = DIALECTS[form.name].items_field
    bodies = {
        "wrong types": {**form.body(), items: 7},
        "unknown role": form.body(form.unknown_role),
        "duplicate ids": form.body(form.user, *form.twins),
        "invalid base64 image": form.body(form.image),
    }
    return {
        "malformed JSON": hello[:-2],
        "lone surrogate": hello.replace(b'"hi"', b'"\\ud800"'),
        "UTF-16": hello.decode().encode("utf-16"),
        "10k-deep JSON": hello.replace(b'"hi"', b"[" * 10_000 + b"]" * 10_000),
        "10k-deep unknown field": hello[:-1] + b',"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        **{name: json.dumps(body).encode() for name, body in bodies.items()},
    }


def large(form: Form, size: int, text: str = "x") -> bytes:
    """A sound request of at least `size` bytes in one long text."""
    hello = json.dumps(form.body(form.user)).encode()
    return hello.replace(b'"hi"', b'"' + text.encode() * (size // len(text)) + b'"')


def in_shape(name: str, status: int, body: bytes) -> bool:
    """Whether this is the dialect's own error."""
    told = json.loads(body)
    error = told["error"]
    if not error["message"]:
        return False
    if name == "anthropic":
        return told["type"] == "error" and error.keys() >= {"type", "message"}
    if name == "gemini":
        return error["code"] == status and error["status"].isupper()
    return error.keys() == {"message", "type", "param", "code"}
