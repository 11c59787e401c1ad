"""Gemini: parses `systemInstruction` and entries of `contents` into canonical messages."""

from __future__ import annotations

import base64
import binascii

import msgspec

from rolltap.proxy.conversation.chat import (
    Message,
    Part,
    Reasoning,
    Text,
    ToolCall,
)
from rolltap.proxy.dialects import gemini_wire as wire
from rolltap.proxy.dialects.arguments import text_of
from rolltap.proxy.dialects.json_request import decode, invalid
from rolltap.proxy.dialects.media import attachment, image_part

_ANSWER_KEYS = ("output", "result", "content", "error")


def parse_system(raw: bytes) -> Message:
    """Parses `systemInstruction`."""
    content = wire.decode_either(raw, wire.Content, "systemInstruction")
    parts = [_text_part(part, f"systemInstruction.parts[{index}]") for index, part in enumerate(content.parts)]
    return Message("system", tuple(part for part in parts if part.text))


def _text_part(part: wire.WirePart, where: str) -> Text:
    if part.text is None:
        raise invalid(where, "only text is allowed here")
    return Text(part.text)


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
