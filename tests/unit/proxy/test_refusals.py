"""What a policy that samples tokens can't do is a 400 that names the field, as the request's own dialect calls it."""

from __future__ import annotations

import base64
from typing import Any

import pytest

PNG = base64.b64encode(b"png").decode()
URL = f"data:image/png;base64,{PNG}"
BLOB = {"mimeType": "image/png", "data": PNG}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
TOOL: Any = {"name": "bash", "parameters": SCHEMA}
CHAT: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": TOOL}]}
RESPONSES: Any = {"input": "hi", "tools": [{"type": "function", **TOOL}]}
MESSAGES: Any = {"max_tokens": 9, "messages": CHAT["messages"], "tools": [{"name": "bash", "input_schema": SCHEMA}]}
GEMINI: Any = {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"functionDeclarations": [TOOL]}]}
PATHS = {
    "openai_chat": ("/v1/chat/completions", CHAT),
    "openai_responses": ("/v1/responses", RESPONSES),
    "anthropic": ("/v1/messages", MESSAGES),
    "gemini": ("/v1beta/models/tiny:generateContent", GEMINI),
}


def user(*content: Any) -> Any:
    return [{"role": "user", "content": list(content)}]


def calling(**config: Any) -> Any:
    return {"toolConfig": {"functionCallingConfig": config}}


IMAGES: list[tuple[str, Any, str]] = [
    ("openai_chat", {"messages": user({"type": "image_url", "image_url": {"url": URL}})}, "messages"),
    ("openai_responses", {"input": user({"type": "input_image", "image_url": URL})}, "input"),
    (
        "anthropic",
        {"messages": user({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}})},
        "messages",
    ),
    ("gemini", {"contents": [{"role": "user", "parts": [{"inlineData": BLOB}]}]}, "contents"),
]
OTHER_TOOL: Any = {"name": "look", "parameters": SCHEMA}
CHAT_TOOLS: Any = [{"type": "function", "function": tool} for tool in (TOOL, OTHER_TOOL)]
RESPONSES_TOOLS: Any = [{"type": "function", **tool} for tool in (TOOL, OTHER_TOOL)]
ALLOWED: Any = {"mode": "auto", "tools": CHAT_TOOLS[:1]}
SOME_ONLY: list[tuple[str, Any, str]] = [
    (
        "openai_chat",
        {"tools": CHAT_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        "tool_choice",
    ),
    (
        "openai_responses",
        {
            "tools": RESPONSES_TOOLS,
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": RESPONSES_TOOLS[:1]},
        },
        "tool_choice",
    ),
    (
        "gemini",
        {
            "tools": [{"functionDeclarations": [TOOL, OTHER_TOOL]}],
            **calling(mode="AUTO", allowedFunctionNames=["bash"]),
        },
        "toolConfig.functionCallingConfig",
    ),
]


REQUIRED: list[tuple[str, Any]] = [
    ("openai_chat", {"tool_choice": "required"}),
    ("openai_responses", {"tool_choice": "required"}),
    ("anthropic", {"tool_choice": {"type": "any"}}),
    ("gemini", calling(mode="ANY")),
]
PREFILLS: list[tuple[str, Any]] = [
    ("openai_chat", {"messages": [{"role": "assistant", "content": "{", "prefix": True}]}),
    ("openai_chat", {"messages": [{"role": "assistant", "content": "{", "partial": True}]}),
    ("anthropic", {"messages": [*CHAT["messages"], {"role": "assistant", "content": "{"}]}),
    ("gemini", {"contents": [*GEMINI["contents"], {"role": "model", "parts": [{"text": "{"}]}]}),
]


def body_of(dialect: str, fields: Any) -> tuple[str, Any]:
    path, body = PATHS[dialect]
    return path, {**({} if dialect == "gemini" else {"model": "tiny"}), **body, **fields}


@pytest.mark.parametrize(("dialect", "fields"), REQUIRED)
async def test_a_required_call_is_asked_for_as_auto_and_noted(plane: Any, dialect: str, fields: Any) -> None:
    assert (await plane.client.post(*body_of(dialect, fields))).status == 200
    shape = (await plane.rows())[0].intent.shape
    assert (shape.unapplied, shape.constrained) == (("tool_choice",), False)


@pytest.mark.parametrize(("dialect", "fields"), PREFILLS)
async def test_a_reply_does_not_go_on_within_a_message(plane: Any, dialect: str, fields: Any) -> None:
    answer = await plane.client.post(*body_of(dialect, fields))
    assert (answer.status, plane.engine.seen) == (400, [])
    assert "prefill" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("dialect", "fields", "named"), IMAGES + SOME_ONLY)
async def test_the_field_is_named(plane: Any, dialect: str, fields: Any, named: str) -> None:
    path, body = PATHS[dialect]
    answer = await plane.client.post(path, {**({} if dialect == "gemini" else {"model": "tiny"}), **body, **fields})
    assert answer.status == 400
    assert answer.json()["error"]["message"].startswith(f"{named}: this policy")
    if dialect.startswith("openai"):
        assert answer.json()["error"]["param"] == named
    assert plane.engine.seen == []
