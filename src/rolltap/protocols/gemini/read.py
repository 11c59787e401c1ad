"""Reads Gemini replies from the vendor. Only the first candidate is read."""

from __future__ import annotations

import msgspec

from rolltap.decoding import from_json
from rolltap.protocols.base import make_choice
from rolltap.protocols.conversation import Choice, Usage
from rolltap.protocols.gemini.parse import parse_content


class _Content(msgspec.Struct):
    parts: list[msgspec.Raw] = []


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, rename="camel"):
    prompt_token_count: int = 0
    candidates_token_count: int = 0
    cached_content_token_count: int = 0
    thoughts_token_count: int = 0


class _Problem(msgspec.Struct):
    message: str = ""


class _Body(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] = []
    usage_metadata: _Usage | None = None
    error: _Problem | None = None


class GeminiReader:
    """Reads one reply."""

    def __init__(self) -> None:
        self.closing = self.ended = False
        self.error = ""
        self.usage: Usage | None = None
        self._parts: list[msgspec.Raw] = []
        self._finish = ""

    def event(self, data: bytes) -> None:
        self._take(from_json(data, _Body))

    def whole(self, body: bytes) -> None:
        """Reads one reply, or the JSON list of chunks of a stream that was not requested as events."""
        for chunk in from_json(body, list[msgspec.Raw]) if body.lstrip()[:1] == b"[" else (body,):
            self._take(from_json(chunk, _Body))
        self.ended = True

    def choice(self) -> Choice:
        (message,) = parse_content(msgspec.json.encode({"role": "model", "parts": self._parts}))
        return make_choice(message, "length" if self._finish == "MAX_TOKENS" else "stop")

    def _take(self, body: _Body) -> None:
        if body.error is not None:
            self.closing = self.ended = True
            self.error = body.error.message
        if (usage := body.usage_metadata) is not None:
            output = usage.candidates_token_count + usage.thoughts_token_count
            cached, thoughts = usage.cached_content_token_count, usage.thoughts_token_count
            self.usage = Usage(usage.prompt_token_count, output, cached, thoughts)
        for candidate in body.candidates[:1]:
            if candidate.content is not None:
                self._parts += [part.copy() for part in candidate.content.parts]
            if candidate.finish_reason is not None:
                self._finish = candidate.finish_reason
                self.closing = self.ended = True
