"""Converts a chat upstream's reply to reply events. (`continuation/parser.py` does the same for token ids.)

The client gets our tool-call ids instead of the upstream's, so that an echoed id identifies the call. A custom tool was
declared to the upstream as a function with one string argument, so its call is sent only when the string is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rolltap.decoding import from_json
from rolltap.protocols.conversation import (
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
from rolltap.protocols.handles import MAX_CALLS
from rolltap.protocols.openai_chat.pieces import is_object, join_details
from rolltap.proxy.engines.base import ChatChunk, ToolDelta


@dataclass(slots=True)
class UpstreamCall:
    """A tool call of the upstream's as it grows. `sent`: the number of its pieces that the client has."""

    position: int
    name: str
    given_id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    pieces: list[str] = field(default_factory=list)
    sent: int = 0
    started: bool = False
    closed: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class ChatReplyParser:
    """Parses one choice. `mint(position)` makes the id of the tool call at `position`.

    The client gets one part after the other, as its protocol may allow no more than one open call. What comes beside a
    call whose arguments are not complete waits until they are, or for the reply's end.

    Calls after the first `MAX_CALLS` are not sent, and the reply is `unparsable`.
    """

    def __init__(self, chat: ChatRequest, mint: Callable[[int], str], index: int) -> None:
        self._custom = {tool.name for tool in chat.tools if tool.kind == "custom"}
        self._mint = mint
        self._index = index
        self._reasoning: list[str] = []
        self._details: list[dict[str, Any]] = []
        self._text: list[str] = []
        self._calls: list[UpstreamCall] = []
        self._waiting: deque[UpstreamCall | ReasoningDelta | TextDelta] = deque()
        self._has_surplus = False

    def feed(self, chunk: ChatChunk) -> list[ReplyEvent]:
        """The events of a chunk."""
        join_details(self._details, chunk.reasoning_details)
        if chunk.reasoning:
            self._reasoning.append(chunk.reasoning)
            self._waiting.append(ReasoningDelta(chunk.reasoning, self._index))
        if chunk.text:
            self._text.append(chunk.text)
            self._waiting.append(TextDelta(chunk.text, self._index))
        for piece in chunk.tool_calls:
            self._take(piece)
        self._has_surplus = self._has_surplus or chunk.nameless_calls
        return self._ready_events()

    def finish(self, reason: str) -> tuple[list[ReplyEvent], Choice]:
        """The last events and the complete choice."""
        events = self._ready_events(ended=True)
        text = "".join(self._text)
        reasoning = "".join(self._reasoning)
        thought = Reasoning(reasoning, details=tuple(self._details))
        parts: tuple[Part, ...] = (thought,) if reasoning or self._details else ()
        parts = (*parts, Text(text)) if text else parts
        calls = tuple(self._tool_call(call) for call in self._calls)
        finish: Any = "tool_calls" if calls and reason == "stop" else reason
        if not calls and reason == "tool_calls":
            finish = "stop"
        return events, Choice(Message("assistant", parts, calls), finish, index=self._index)

    @property
    def unparsable(self) -> bool:
        """Whether the arguments of some function call are not a JSON object, or something of a call was not sent."""
        return self._has_surplus or any(
            call.name not in self._custom and not is_object(call.arguments or "{}") for call in self._calls
        )

    def _take(self, piece: ToolDelta) -> None:
        if piece.position >= MAX_CALLS:
            self._has_surplus = True
            return
        if piece.position == len(self._calls):
            call = UpstreamCall(piece.position, piece.name, piece.id)
            self._calls.append(call)
            self._waiting.append(call)
        call = self._calls[piece.position]
        call.extra |= piece.extra
        if call.closed:  # the client has its end
            self._has_surplus = self._has_surplus or bool(piece.arguments.strip())
        elif piece.arguments:
            call.pieces.append(piece.arguments)

    def _ready_events(self, *, ended: bool = False) -> list[ReplyEvent]:
        """The events of all parts that may be sent now, in the order in which the parts began."""
        events: list[ReplyEvent] = []
        while self._waiting:
            part = self._waiting[0]
            if not isinstance(part, UpstreamCall):
                events.append(part)
            else:
                events += self._growth(part)
                followed = len(self._waiting) > 1 and is_object(part.arguments)
                if not (ended or followed):
                    break
                events += self._close(part)
            self._waiting.popleft()
        return events

    def _growth(self, call: UpstreamCall) -> list[ReplyEvent]:
        """The events of what a call has and the client has not; a custom tool's text comes at its end."""
        events: list[ReplyEvent] = []
        if not call.started:
            call.started = True
            made = self._tool_call(call)
            events.append(ToolCallStarted(call.position, made.id, made.name, made.kind, self._index))
        if call.name not in self._custom:
            events += [ToolCallDelta(call.position, piece, self._index) for piece in call.pieces[call.sent :]]
            call.sent = len(call.pieces)
        return events

    def _close(self, call: UpstreamCall) -> list[ReplyEvent]:
        call.closed = True
        made = self._tool_call(call)
        whole = [ToolCallDelta(call.position, made.arguments, self._index)] if made.kind == "custom" else []
        return [*whole, ToolCallEnded(call.position, self._index)]

    def _tool_call(self, call: UpstreamCall) -> ToolCall:
        is_custom = call.name in self._custom
        return ToolCall(
            self._mint(call.position),
            call.name,
            _free_text(call.arguments) if is_custom else call.arguments,
            "custom" if is_custom else "function",
            call.given_id,
            call.extra,
        )


class _Input(msgspec.Struct):
    input: str


def _free_text(arguments: str) -> str:
    """A custom tool's text: the function's one argument. Arguments that do not parse are returned unchanged."""
    try:
        return from_json(arguments, _Input).input
    except msgspec.MsgspecError:
        return arguments
