"""Parses `systemInstruction` and entries of `contents` into canonical messages, and Google's schemas into JSON Schema.

Some clients omit the ids of function calls and responses, or send responses twice: `Identifier` gives and drops them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rolltap.protocols.cache_space import CacheSpace, WeighedCache, message_bytes
from rolltap.protocols.contents import attachment, image_part, text_of
from rolltap.protocols.conversation import Message, Part, Reasoning, Text, ToolCall
from rolltap.protocols.gemini import wire
from rolltap.protocols.gemini.wire import camel_key
from rolltap.protocols.requests import decode, invalid

_ANSWER_KEYS = ("output", "result", "content", "error")


def parse_system(raw: bytes) -> Message:
    """Parses `systemInstruction`."""
    content = wire.decode_either(raw, wire.Content, "systemInstruction")
    for index, part in enumerate(content.parts):
        if part.text is None:
            raise invalid(f"systemInstruction.parts[{index}]", "only text is allowed here")
    return Message("system", tuple(Text(part.text) for part in content.parts if part.text))


def parse_content(raw: bytes) -> tuple[Message, ...]:
    """Parses an entry of `contents`. A call or response that has no id gets an empty one."""
    content = wire.decode_either(raw, wire.Content)
    if content.role == "model":
        return (_model_turn(content),)
    messages: list[Message] = []
    parts: list[Part] = []
    for index, part in enumerate(content.parts):
        where = f"parts[{index}]"
        if part.function_response is not None:
            if parts:
                messages.append(Message("user", tuple(parts)))
                parts = []
            messages.append(_response(part.function_response, f"{where}.functionResponse"))
        elif part.function_call is not None:
            raise invalid(f"{where}.functionCall", "only a model's content takes function calls")
        elif part.inline_data is not None or part.file_data is not None:
            parts.append(_media(part, where, from_tool=bool(messages)))
        elif part.text:
            parts.append(Text(part.text))
    if parts or not messages:
        messages.append(Message("system" if content.role == "system" else "user", tuple(parts)))
    return tuple(messages)


def _model_turn(content: wire.Content) -> Message:
    parts: list[Part] = []
    calls: list[ToolCall] = []
    handle: str | None = None
    for index, part in enumerate(content.parts):
        where = f"parts[{index}]"
        signature = _signature(part.thought_signature)
        handle = handle or signature
        if part.function_call is not None:
            call = part.function_call
            calls.append(ToolCall(call.id or "", call.name, text_of(call.args, f"{where}.functionCall.args")))
        elif part.function_response is not None or part.inline_data is not None or part.file_data is not None:
            raise invalid(where, "a model's content takes text, thoughts and function calls")
        elif part.thought:
            parts.append(Reasoning(part.text or "", signature))
        elif part.text:
            parts.append(Text(part.text))
    return Message("assistant", tuple(parts), tuple(calls), handle=handle)


def join_contents(turn: tuple[Message, ...]) -> Message:
    """Joins the contents of one turn of the model."""
    parts = tuple(part for message in turn for part in message.parts)
    calls = tuple(call for message in turn for call in message.tool_calls)
    return Message("assistant", parts, calls, handle=next((m.handle for m in turn if m.handle), None))


def _signature(text: str | None) -> str | None:
    """Decodes a signature. Clients that keep it as bytes may send it in the other base64 alphabet."""
    if not text:
        return None
    try:
        data = base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4), validate=True)
        return data.decode("ascii")
    except (binascii.Error, ValueError):
        return text


def _response(response: wire.FunctionResponse, where: str) -> Message:
    parts: list[Part] = []
    text, is_error = _answer(response.response, f"{where}.response")
    if text:
        parts.append(Text(text))
    for index, part in enumerate(response.parts or ()):
        parts.append(_media(part, f"{where}.parts[{index}]", from_tool=True))
    return Message("tool", tuple(parts), tool_call_id=response.id or "", name=response.name, is_error=is_error)


def _answer(raw: msgspec.Raw, where: str) -> tuple[str, bool]:
    """Returns a response as text, and whether it is an error. The text is the only string if its key is a usual one,
    else JSON."""
    value = decode(raw, dict[str, msgspec.Raw], where)
    if len(value) == 1:
        key, inner = next(iter(value.items()))
        if key in _ANSWER_KEYS and bytes(inner).startswith(b'"'):
            return decode(inner, str, where), key == "error"
    return text_of(raw, where), "error" in value


def _media(part: wire.WirePart | wire.FunctionResponsePart, where: str, *, from_tool: bool) -> Part:
    """An image, or an attachment. The vendor's stored files can't be read."""
    if part.file_data is not None:
        return attachment(part.file_data.mime_type or "", f"{where}.fileData")
    if part.inline_data is None:
        raise invalid(where, "expected inlineData or fileData")
    data = part.inline_data.data.replace("-", "+").replace("_", "/")
    url = f"data:{part.inline_data.mime_type};base64,{data}"
    return image_part(url, f"{where}.inlineData.data", from_tool=from_tool)


@dataclass(slots=True)
class UnansweredCall:
    """A function call that has no response yet."""

    id: str
    name: str


class Identifier:
    """Adds missing ids to calls and responses, and drops repeated responses.

    One per dialect: equal histories get the same message objects.
    """

    def __init__(self, space: CacheSpace) -> None:
        self._calls_with_ids: WeighedCache[tuple[Message, int], Message] = WeighedCache(message_bytes, space)
        self._responses_with_ids: WeighedCache[tuple[Message, str], Message] = WeighedCache(message_bytes, space)

    def __call__(self, messages: Sequence[Message], places: Sequence[str]) -> tuple[list[Message], list[str]]:
        open_calls: list[UnansweredCall] = []
        responses: dict[str, Message] = {}
        kept_messages: list[Message] = []
        kept_places: list[str] = []
        count = 0
        for message, place in zip(messages, places, strict=True):
            if message.tool_calls:
                if not all(call.id for call in message.tool_calls):
                    message = self._calls_with_ids.get((message, count), _with_call_ids)
                count += len(message.tool_calls)
                open_calls = [UnansweredCall(call.id, call.name) for call in message.tool_calls]
            elif message.role == "tool":
                resolved = self._response(message, open_calls, responses)
                if resolved is None:
                    continue
                message = resolved
            kept_messages.append(message)
            kept_places.append(place)
        return kept_messages, kept_places

    def _response(
        self, message: Message, open_calls: list[UnansweredCall], responses: dict[str, Message]
    ) -> Message | None:
        """Returns the response with its call's id; None if it repeats an earlier response."""
        same_name = [call for call in open_calls if call.name == message.name]
        if not message.tool_call_id:
            if not same_name:
                return None if any(_is_repeat(message, earlier) for earlier in responses.values()) else message
            message = self._responses_with_ids.get((message, same_name[0].id), _with_call_id)
        call_id = message.tool_call_id or ""
        if call_id in responses and _is_repeat(message, responses[call_id]):
            return None
        open_calls[:] = [call for call in open_calls if call.id != call_id]
        responses[call_id] = message
        return message


def _with_call_ids(key: tuple[Message, int]) -> Message:
    message, start = key
    calls = tuple(
        call if call.id else msgspec.structs.replace(call, id=f"call_{start + offset}")
        for offset, call in enumerate(message.tool_calls)
    )
    return msgspec.structs.replace(message, tool_calls=calls)


def _with_call_id(key: tuple[Message, str]) -> Message:
    message, call_id = key
    return msgspec.structs.replace(message, tool_call_id=call_id)


def _is_repeat(a: Message, b: Message) -> bool:
    return a.name == b.name and a.parts == b.parts


_LISTS = ("anyOf", "prefixItems")
_OWN = frozenset({"propertyOrdering", "example", "nullable"})


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the equivalent JSON Schema. The caller has checked the depth."""
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        key = camel_key(name)
        if key == "type" and isinstance(value, str):
            converted[key] = value.lower()
        elif key == "properties" and isinstance(value, dict):
            converted[key] = {field: _convert_value(item) for field, item in value.items()}
        elif key in _LISTS and isinstance(value, list):
            converted[key] = [_convert_value(item) for item in value]
        elif key in ("items", "additionalProperties"):
            converted[key] = _convert_value(value)
        elif key not in _OWN:
            converted[key] = value
    if schema.get("nullable") is True and isinstance(converted.get("type"), str):
        converted["type"] = [converted["type"], "null"]
    return converted


def _convert_value(value: Any) -> Any:
    return json_schema(value) if isinstance(value, dict) else value
