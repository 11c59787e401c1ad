"""Reads OpenAI Chat Completions and legacy Completions replies from the vendor. Only the first choice is read."""

from __future__ import annotations

from typing import Any

import msgspec

from rolltap.decoding import from_json
from rolltap.protocols.base import make_choice
from rolltap.protocols.conversation import Choice, Usage
from rolltap.protocols.openai_chat.parse import parse_message
from rolltap.protocols.openai_chat.pieces import CallAssembler, CallDelta, MessagePiece, OpenAIUsage, ReplyChoice

DONE = b"[DONE]"
FINISHES = {"length": "length", "max_tokens": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}


class _Choice(ReplyChoice):
    text: str | None = None  # of the legacy Completions


class _Problem(msgspec.Struct):
    message: str = ""


class _Body(msgspec.Struct):
    choices: list[_Choice | None] | None = None
    usage: OpenAIUsage | None = None
    error: _Problem | None = None


class ChatReader:
    """Reads one completion."""

    def __init__(self) -> None:
        self.closing = self.ended = False
        self.error = ""
        self.usage: Usage | None = None
        self._text = self._thinking = ""
        self._assembler = CallAssembler()
        self._calls: list[list[CallDelta]] = []
        self._finish = ""

    def event(self, data: bytes) -> None:
        if data.strip() == DONE:
            self.closing = self.ended = True
            return
        self._take(from_json(data, _Body))

    def whole(self, body: bytes) -> None:
        self._take(from_json(body, _Body))
        self.ended = True

    def choice(self) -> Choice:
        entry = {
            "role": "assistant",
            "content": self._text or None,
            "reasoning_content": self._thinking or None,
            "tool_calls": [_tool_call(pieces) for pieces in self._calls] or None,
        }
        return make_choice(parse_message(msgspec.json.encode(entry)), FINISHES.get(self._finish.lower(), "stop"))

    def _take(self, body: _Body) -> None:
        if body.error is not None:
            self.closing = self.ended = True
            self.error = body.error.message
        if body.usage is not None:
            self.usage = body.usage.usage()
        for choice in body.choices or ():
            if choice is not None and not choice.index:
                self._grow(choice)

    def _grow(self, choice: _Choice) -> None:
        message = choice.delta or choice.message or MessagePiece(content=choice.text)
        thinking, text = message.texts()
        self._thinking += thinking
        self._text += text
        for piece in self._assembler.take(message.call_pieces(), whole=choice.message is not None):
            if piece.position == len(self._calls):
                self._calls.append([])
            self._calls[piece.position].append(piece)
        if choice.finish_reason:
            self._finish = choice.finish_reason
            self.closing = True


def _tool_call(pieces: list[CallDelta]) -> dict[str, Any]:
    """A call as a harness sends it back. Only the old `function_call` has no id."""
    first, text = pieces[0], "".join(piece.arguments for piece in pieces)
    kind, field = ("custom", "input") if first.is_custom else ("function", "arguments")
    return {"id": first.id or f"call_{first.position}", "type": kind, kind: {"name": first.name, field: text}}
