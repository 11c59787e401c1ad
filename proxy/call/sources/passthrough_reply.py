"""What a vendor's reply says, read while its bytes go by.

A reader takes a dialect's bodies and events and gives the assistant's turn, as the dialect will parse it when the
harness sends it back: that is how the next call finds this one.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rolltap.errors import EngineProtocolError, InvalidRequest
from rolltap.proxy.conversation.chat import Choice, Usage
from rolltap.proxy.dialects.reply_reader import ReplyReader
from rolltap.proxy.engines.sse import SseParser

MAX_BODY = 64 << 20
"""Bytes of a whole reply that are kept to be read."""


class Reading:
    """A reply on its way to the client: what was read of it, and which of its bytes must wait for the record.

    A stream is held back from the event that clients may take for its end, another reply from its last piece.
    """

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._events: SseParser | None = None
        self._body = bytearray()
        self._held: list[bytes] = []
        self._unread = False

    def begin(self, *, streamed: bool) -> None:
        """The reply's head has come."""
        self._events = SseParser() if streamed else None

    def pass_on(self, chunk: bytes) -> bytes:
        """What may go to the client now that `chunk` has come."""
        self._held.append(chunk)
        if self._events is None:
            self._body += chunk[: MAX_BODY - len(self._body)]
            ready, self._held = b"".join(self._held[:-1]), self._held[-1:]
            return ready
        self._read_events(chunk)
        return b"" if self._reader.closing else self.rest()

    def rest(self) -> bytes:
        """What was held back."""
        held, self._held = b"".join(self._held), []
        return held

    def end(self) -> None:
        """The vendor has sent everything."""
        if self._events is None:
            self._quietly(self._reader.whole, bytes(self._body))

    @property
    def ended(self) -> bool:
        """Whether the reply is all there, as far as can be told."""
        return self._reader.ended or self._unread

    @property
    def error(self) -> str:
        return self._reader.error

    @property
    def usage(self) -> Usage | None:
        return self._reader.usage

    def choice(self) -> Choice | None:
        """The assistant's turn so far; None if it could not be read or says nothing."""
        try:
            choice = self._reader.choice()
        except (msgspec.MsgspecError, InvalidRequest):
            return None
        return choice if choice.message.parts or choice.message.tool_calls else None

    def _read_events(self, chunk: bytes) -> None:
        assert self._events is not None
        try:
            events = self._events.feed(chunk)
        except EngineProtocolError:
            self._unread = True
            return
        for data in events:
            self._quietly(self._reader.event, data)

    def _quietly(self, read: Callable[[bytes], None], data: bytes) -> None:
        try:
            read(data)
        except (msgspec.MsgspecError, InvalidRequest):
            self._unread = True
