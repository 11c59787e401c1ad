"""Converts a chat upstream's reply to reply events. (`continuation/parser.py` does the same for token ids.)

The client gets our tool-call ids instead of the upstream's, so that an echoed id identifies the call. A custom tool was
declared to the upstream as a function with one string argument, so its call is sent only when the string is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from rolltap.decoding import from_json
from rolltap.proxy.continuation.handles import MAX_CALLS
from rolltap.proxy.conversation.chat import (
    ChatRequest,
    Choice,
    Message,
    Part,
    Reasoning,
    ReasoningDelta,
    ReplyEvent,
    Text,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from rolltap.proxy.engines.base import ChatChunk, ToolDelta


class ChatReplyParser:
    """Parses one choice. `mint(position)` makes the id of the tool call at `position`.

    Calls after the first `MAX_CALLS` are not sent, and the reply is `unparsable`.
    """

    def __init__(self, chat: ChatRequest, mint: Callable[[int], str], index: int) -> None:
        self._custom = {tool.name for tool in chat.tools if tool.kind == "custom"}
        self._mint = mint
        self._index = index
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []
        self._has_surplus = False

    def feed(self, chunk: ChatChunk) -> list[ReplyEvent]:
        """The events of a chunk."""
        events: list[ReplyEvent] = []
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
            events.append(ReasoningDelta(chunk.reasoning, self._index))
        if chunk.text:
            self._text.append(chunk.text)
            events.append(TextDelta(chunk.text, self._index))
        for piece in chunk.tool_calls:
            events += self._piece(piece)
        return events

    def finish(self, reason: str) -> tuple[list[ReplyEvent], Choice]:
        """The last events and the complete choice."""
        events = self._close_call()
        text = "".join(self._text)
        reasoning = "".join(self._reasoning)
        parts: tuple[Part, ...] = (Reasoning(reasoning),) if reasoning else ()
        parts = (*parts, Text(text)) if text else parts
        calls = tuple(self._call(position) for position in range(len(self._names)))
        finish: Any = "tool_calls" if calls and reason == "stop" else reason
        return events, Choice(Message("assistant", parts, calls), finish, index=self._index)

    @property
    def unparsable(self) -> bool:
        """Whether the arguments of some function call are not a JSON object, or there are surplus calls."""
        return self._has_surplus or any(
            name not in self._custom and not _is_object("".join(texts))
            for name, texts in zip(self._names, self._arguments, strict=True)
        )

    def _piece(self, piece: ToolDelta) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        if piece.position >= len(self._names):
            if len(self._names) == MAX_CALLS:
                self._has_surplus = True
                return []
            events += self._close_call()
            self._names.append(piece.name)
            self._arguments.append([])
            call = self._call(len(self._names) - 1)
            events.append(ToolCallStarted(len(self._names) - 1, call.id, call.name, call.kind, self._index))
        at = min(piece.position, len(self._names) - 1)
        self._arguments[at].append(piece.arguments)
        if piece.arguments and self._names[at] not in self._custom:
            events.append(ToolCallDelta(at, piece.arguments, self._index))
        return events

    def _close_call(self) -> list[ReplyEvent]:
        """The events that end the last tool call; a custom tool's text comes with them."""
        if not self._names:
            return []
        at = len(self._names) - 1
        call = self._call(at)
        whole: list[ReplyEvent] = [ToolCallDelta(at, call.arguments, self._index)] if call.kind == "custom" else []
        return [*whole, ToolCallEnded(at, self._index)]

    def _call(self, position: int) -> ToolCall:
        name, arguments = self._names[position], "".join(self._arguments[position])
        if name in self._custom:
            return ToolCall(self._mint(position), name, _free_text(arguments), "custom")
        return ToolCall(self._mint(position), name, arguments)


class _Input(msgspec.Struct):
    input: str


def _free_text(arguments: str) -> str:
    """A custom tool's text: the function's one argument. Arguments that do not parse are returned unchanged."""
    try:
        return from_json(arguments, _Input).input
    except msgspec.MsgspecError:
        return arguments


def _is_object(arguments: str) -> bool:
    try:
        from_json(arguments or "{}", dict[str, msgspec.Raw])
    except msgspec.MsgspecError:
        return False
    return True
