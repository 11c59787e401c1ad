"""Reads Anthropic Messages replies from the vendor."""

from __future__ import annotations

from typing import Any

import msgspec

from rolltap.decoding import from_json
from rolltap.protocols.anthropic.parse import parse_entry
from rolltap.protocols.base import make_choice
from rolltap.protocols.conversation import Choice, Usage

READ = frozenset({"text", "thinking", "redacted_thinking", "tool_use"})
"""Blocks of an assistant message that the dialect knows. Blocks of the vendor's own tools are skipped."""

FINISHES = {"max_tokens": "length", "model_context_window_exceeded": "length", "tool_use": "tool_calls"}


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(msgspec.Struct):
    content: list[dict[str, Any]] = []
    stop_reason: str | None = None
    usage: _Usage | None = None


class _Delta(msgspec.Struct):
    text: str = ""
    thinking: str = ""
    signature: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Problem(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: dict[str, Any] | None = None
    delta: _Delta | None = None
    usage: _Usage | None = None
    error: _Problem | None = None


class MessagesReader:
    """Reads one message."""

    def __init__(self) -> None:
        self.closing = self.ended = False
        self.error = ""
        self.usage: Usage | None = None
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, str] = {}
        self._stop: str | None = None

    def event(self, data: bytes) -> None:
        event = from_json(data, _Event)
        match event.type:
            case "message_start" if event.message is not None:
                self._count(event.message.usage)
            case "content_block_start" if event.content_block is not None:
                self._blocks[event.index] = event.content_block
            case "content_block_delta" if event.delta is not None:
                block = self._blocks.setdefault(event.index, {"type": "text", "text": ""})
                for name in ("text", "thinking", "signature"):
                    if piece := getattr(event.delta, name):
                        block[name] = block.get(name, "") + piece
                self._inputs[event.index] = self._inputs.get(event.index, "") + event.delta.partial_json
            case "message_delta" if event.delta is not None:
                self.closing = True
                self._stop = event.delta.stop_reason
                self._count(event.usage)
            case "message_stop":
                self.closing = self.ended = True
            case "error":
                self.closing = self.ended = True
                self.error = event.error.message if event.error is not None else "error"

    def whole(self, body: bytes) -> None:
        message = from_json(body, _Message)
        self._blocks = dict(enumerate(message.content))
        self._stop = message.stop_reason
        self._count(message.usage)
        self.ended = True

    def choice(self) -> Choice:
        inputs = {index: {"input": msgspec.Raw(text.encode())} for index, text in self._inputs.items() if text}
        blocks = [block | inputs.get(index, {}) for index, block in sorted(self._blocks.items())]
        readable_blocks = [block for block in blocks if block.get("type") in READ]
        entry = parse_entry(msgspec.json.encode({"role": "assistant", "content": readable_blocks}), {})
        return make_choice(entry.messages[0], FINISHES.get(self._stop or "", "stop"))

    def _count(self, usage: _Usage | None) -> None:
        """Replaces earlier counts by later ones. The vendor's `input_tokens` excludes cached tokens."""
        if usage is None:
            return
        previous = self.usage or Usage()
        cached = usage.cache_read_input_tokens or 0
        prompt = (usage.input_tokens or 0) + cached + (usage.cache_creation_input_tokens or 0)
        self.usage = Usage(prompt or previous.prompt, usage.output_tokens or previous.output, cached or previous.cached)
