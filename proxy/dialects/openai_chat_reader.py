"""Reads OpenAI Chat Completions and legacy Completions replies from the vendor. Only the first choice is read."""

from __future__ import annotations

from typing import Any

import msgspec

from rolltap.decoding import from_json
from rolltap.proxy.conversation.chat import Choice, Usage
from rolltap.proxy.conversation.openai_usage import OpenAIUsage
from rolltap.proxy.dialects.openai_chat_messages import parse_message
from rolltap.proxy.dialects.reply_reader import make_choice

DONE = b"[DONE]"
FINISHES = {"length": "length", "tool_calls": "tool_calls", "function_call": "tool_calls"}
TEXTS = ("content", "refusal", "reasoning_content", "reasoning")


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool


class _ToolCall(msgspec.Struct):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _Function | None = None
    custom: _Function | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Problem(msgspec.Struct):
    message: str = ""


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: OpenAIUsage | None = None
    error: _Problem | None = None


class ChatReader:
    """Reads one completion."""

    def __init__(self) -> None:
        self.closing = self.ended = False
        self.error = ""
        self.usage: Usage | None = None
        self._message: dict[str, Any] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish = ""

    def event(self, data: bytes) -> None:
        if data == DONE:
            self.closing = self.ended = True
            return
        self._take(from_json(data, _Body))

    def whole(self, body: bytes) -> None:
        self._take(from_json(body, _Body))
        self.ended = True

    def choice(self) -> Choice:
        calls = [self._calls[index] for index in sorted(self._calls)]
        entry = {"role": "assistant", "content": None, **self._message, **({"tool_calls": calls} if calls else {})}
        return make_choice(parse_message(msgspec.json.encode(entry)), FINISHES.get(self._finish, "stop"))

    def _take(self, body: _Body) -> None:
        if body.error is not None:
            self.closing = self.ended = True
            self.error = body.error.message
        if body.usage is not None:
            self.usage = body.usage.usage()
        for choice in body.choices:
            if choice.index == 0:
                self._grow(choice)

    def _grow(self, choice: _Choice) -> None:
        message = choice.delta or choice.message or _Message(content=choice.text)
        for name in TEXTS:
            if piece := getattr(message, name):
                self._message[name] = self._message.get(name, "") + piece
        for position, call in enumerate(message.tool_calls or ()):
            self._call(call.index if choice.delta is not None else position, call)
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            self.closing = True

    def _call(self, index: int, piece: _ToolCall) -> None:
        kind = "custom" if piece.custom is not None else "function"
        text = "input" if kind == "custom" else "arguments"
        call = self._calls.setdefault(index, {"id": "", "type": kind, kind: {"name": "", text: ""}})
        call["id"] = piece.id or call["id"]
        if (details := piece.custom or piece.function) is not None and kind in call:
            call[kind]["name"] = details.name or call[kind]["name"]
            call[kind][text] += getattr(details, text) or ""
