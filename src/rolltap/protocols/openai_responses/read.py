"""Reads OpenAI Responses replies from the vendor."""

from __future__ import annotations

import msgspec

from rolltap.decoding import from_json
from rolltap.protocols.base import make_choice
from rolltap.protocols.conversation import Choice, Text, Usage
from rolltap.protocols.openai_responses.parse import TEXT as TEXT_RANK
from rolltap.protocols.openai_responses.parse import ContentPiece, join_pieces, parse_item

READ = frozenset({"message", "reasoning", "function_call", "custom_tool_call"})
"""Items of an assistant turn that the dialect knows. Items of the vendor's own tools are skipped."""

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


NOTHING = msgspec.Raw()


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Reasoning(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Cached | None = None
    output_tokens_details: _Reasoning | None = None


class _Problem(msgspec.Struct):
    message: str | None = None


class _Kind(msgspec.Struct):
    type: str = ""


class _Response(msgspec.Struct):
    output: list[msgspec.Raw] = []
    status: str = ""
    usage: _Usage | None = None
    error: _Problem | None = None


class _Event(msgspec.Struct):
    type: str
    response: _Response | None = None
    item: msgspec.Raw = NOTHING  # with the type `Raw | None`, msgspec accepts only null
    delta: msgspec.Raw = NOTHING
    message: str | None = None


class ResponsesReader:
    """Reads one response."""

    def __init__(self) -> None:
        self.closing = self.ended = False
        self.error = ""
        self.usage: Usage | None = None
        self._items: list[msgspec.Raw] = []
        self._open_text = ""  # the text of a message that has not ended
        self._status = ""

    def event(self, data: bytes) -> None:
        event = from_json(data, _Event)
        if event.type in ENDS and event.response is not None:
            self.closing = self.ended = True
            self._take(event.response)
        elif event.type == "error":
            self.closing = self.ended = True
            self.error = event.message or "error"
        elif event.type == "response.output_item.done" and event.item is not NOTHING:
            self._items.append(event.item.copy())
            self._open_text = ""
        elif event.type == "response.output_text.delta" and event.delta is not NOTHING:
            self._open_text += from_json(event.delta, str)

    def whole(self, body: bytes) -> None:
        self._take(from_json(body, _Response))
        self.ended = True

    def choice(self) -> Choice:
        pieces: list[ContentPiece] = []
        for item in self._items:
            if from_json(item, _Kind).type in READ:
                piece = parse_item(bytes(item))
                assert isinstance(piece, ContentPiece)
                pieces.append(piece)
        if self._open_text:
            pieces.append(ContentPiece(TEXT_RANK, (Text(self._open_text),)))
        return make_choice(join_pieces(tuple(pieces)), "length" if self._status == "incomplete" else "stop")

    def _take(self, response: _Response) -> None:
        self._status, self._open_text = response.status, ""
        if response.output or not self._items:
            self._items = [item.copy() for item in response.output]
        if response.error is not None:
            self.error = response.error.message or "error"
        if (usage := response.usage) is not None:
            cached = usage.input_tokens_details.cached_tokens if usage.input_tokens_details else 0
            reasoning = usage.output_tokens_details.reasoning_tokens if usage.output_tokens_details else 0
            self.usage = Usage(usage.input_tokens, usage.output_tokens, cached or 0, reasoning or 0)
