"""Writes Anthropic Messages replies: as one body, or as events from `message_start` to `message_stop`; also errors.

Blocks are in the order of sampling: thinking, text, tool uses. Thinking is always sent in full, even with
`display: omitted`: a client that has it can send it back.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from rolltap.errors import ContextOverflow, RolltapError
from rolltap.protocols.base import WireReply
from rolltap.protocols.contents import UnparsedWrapper, object_of, whole_members
from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    ReasoningDelta,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from rolltap.protocols.replies import EVENT_STREAM, encode, error_reply, named_event

PING = named_event("ping", {"type": "ping"})
STOP = named_event("message_stop", {"type": "message_stop"})

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class TextOut(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingOut(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseOut(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw | UnparsedWrapper


BlockOut = TextOut | ThinkingOut | ToolUseOut


class UsageOut(Struct):
    """Anthropic's `input_tokens` excludes cached tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageOut(Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[BlockOut]
    stop_reason: str | None
    stop_sequence: str | None
    usage: UsageOut
    role: str = "assistant"


def message_body(request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
    """Returns the body of a reply that is not streamed."""
    choice = ended.choices[0]
    message = choice.message
    blocks: list[BlockOut] = []
    if message.reasoning:
        blocks.append(ThinkingOut(message.reasoning, started.handle or started.call_id))
    if message.text:
        blocks.append(TextOut(message.text))
    blocks += [ToolUseOut(call.id, call.name, _input(call.arguments)) for call in message.tool_calls]
    reason, sequence = stop_reason(choice)
    return encode(MessageOut(_message_id(started), request.model, blocks, reason, sequence, usage_out(ended.usage)))


def _input(arguments: str) -> msgspec.Raw | UnparsedWrapper:
    """Returns the arguments as an object. If they were cut off: the members that a client gets from the deltas."""
    value = object_of(arguments)
    if isinstance(value, UnparsedWrapper) and (members := whole_members(arguments)) is not None:
        return msgspec.Raw(encode(members))
    return value


def stop_reason(choice: Choice) -> tuple[str, str | None]:
    """Returns `stop_reason` and `stop_sequence`."""
    if choice.stop is not None:
        return "stop_sequence", choice.stop
    return {"length": "max_tokens", "tool_calls": "tool_use"}.get(choice.finish, "end_turn"), None


def usage_out(usage: Usage) -> UsageOut:
    """Returns token counts in Anthropic's form: the three input counts add up to the whole prompt."""
    return UsageOut(usage.prompt - usage.cached, usage.output, usage.cached)


def _message_id(started: ReplyStarted) -> str:
    return f"msg_{started.handle or started.call_id}"


class MessagesWriter:
    """Writes the events. At most one block is open at a time."""

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest) -> None:
        self._model = request.model
        self._signature = ""
        self._index = -1
        self._open: Literal["thinking", "text", "tool_use"] | None = None

    def write(self, event: ReplyEvent) -> bytes:
        match event:
            case TextDelta(text):
                return self._ensure("text", TextOut("")) + self._delta({"type": "text_delta", "text": text})
            case ReasoningDelta(text):
                opening = self._ensure("thinking", ThinkingOut("", ""))
                return opening + self._delta({"type": "thinking_delta", "thinking": text})
            case ToolCallDelta():
                return self._delta({"type": "input_json_delta", "partial_json": event.arguments})
            case ReplyStarted():
                self._signature = event.handle or event.call_id
                usage = UsageOut(event.prompt_tokens, 0)
                message = MessageOut(_message_id(event), self._model, [], None, None, usage)
                return named_event("message_start", {"type": "message_start", "message": message}) + PING
            case ToolCallStarted():
                block = ToolUseOut(event.id, event.name, msgspec.Raw(b"{}"))
                return self._close() + self._start("tool_use", block)
            case ToolCallEnded():
                return self._close()
            case ReplyEnded():
                return self._ended(event)

    def keep_alive(self) -> bytes:
        return PING if self._signature else b""

    def _ensure(self, kind: Literal["thinking", "text"], block: BlockOut) -> bytes:
        return b"" if self._open == kind else self._close() + self._start(kind, block)

    def _start(self, kind: Literal["thinking", "text", "tool_use"], block: BlockOut) -> bytes:
        self._open = kind
        self._index += 1
        payload = {"type": "content_block_start", "index": self._index, "content_block": block}
        return named_event("content_block_start", payload)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        payload = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return named_event("content_block_delta", payload)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": self._signature})
        self._open = None
        return signature + named_event("content_block_stop", {"type": "content_block_stop", "index": self._index})

    def _ended(self, event: ReplyEnded) -> bytes:
        reason, sequence = stop_reason(event.choices[0])
        payload = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage_out(event.usage),
        }
        return self._close() + named_event("message_delta", payload) + STOP


def anthropic_error(error: RolltapError) -> WireReply:
    """`{"type": "error", "error": {...}}`. Claude Code compacts its history if the message has "prompt is too long"."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextOverflow):  # in Anthropic's wording: Claude Code parses the two numbers
        has_counts = error.tokens is not None and error.limit is not None
        message = f"prompt is too long: {f'{error.tokens} tokens > {error.limit} maximum' if has_counts else message}"
    return error_reply(error, {"type": "error", "error": {"type": kind, "message": message}})
