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
from rolltap.proxy.engines.http import said
from rolltap.proxy.engines.sse import SseParser

MAX_BODY = 64 << 20
"""Bytes of a whole reply that are kept to be read."""

MAX_ERROR_BYTES = 65_536
"""Bytes of an error's body that are looked at for its message."""


class RelayedReplyReader:
    """A reply on its way to the client: what it says, and which of its bytes must wait for the record.

    A stream is held back from the event that clients may take for its end, another reply from its last piece.
    """

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._status = 0  # no head yet
        self._events: SseParser | None = None
        self._body = bytearray()
        self._withheld: list[bytes] = []
        self._unreadable = False

    def begin(self, status: int, *, streamed: bool) -> None:
        """Takes the head of the reply. Only a good one is read as a stream."""
        self._status = status
        self._events = SseParser() if streamed and status < 300 else None

    @property
    def streamed(self) -> bool:
        return self._events is not None

    def pass_on(self, chunk: bytes) -> bytes:
        """What may go to the client now that `chunk` has come."""
        self._withheld.append(chunk)
        if self._events is None:
            limit = MAX_BODY if self._status < 300 else MAX_ERROR_BYTES
            self._body += chunk[: limit - len(self._body)]
            ready, self._withheld = b"".join(self._withheld[:-1]), self._withheld[-1:]
            return ready
        self._read_events(chunk)
        return b"" if self._reader.closing else self.rest()

    def rest(self) -> bytes:
        """What was held back."""
        withheld, self._withheld = b"".join(self._withheld), []
        return withheld

    def end(self) -> None:
        """The vendor has sent everything."""
        if self._events is None and self._status < 300:
            self._quietly(self._reader.whole, bytes(self._body))

    @property
    def ended(self) -> bool:
        """Whether the reply is all there, as far as can be told."""
        return self._reader.ended or self._unreadable

    @property
    def problem(self) -> str:
        """Why the reply is no completed call; empty if it is one. Words about a refused key are left out."""
        if self._status in (401, 403):
            return f"the vendor answered {self._status}"
        if self._status and not 200 <= self._status < 300:
            return f"the vendor answered {self._status}: {said(self._body.decode('utf-8', 'replace'))}"
        if self._reader.error:
            return f"the vendor said: {self._reader.error}"
        return "" if self.ended else "the vendor's stream ended before its last event"

    @property
    def usage(self) -> Usage | None:
        return self._reader.usage

    def choice(self) -> Choice | None:
        """The assistant's turn so far; None if it could not be read or says nothing."""
        try:
            choice = self._reader.choice()
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest):
            return None
        return choice if choice.message.parts or choice.message.tool_calls else None

    def _read_events(self, chunk: bytes) -> None:
        assert self._events is not None
        try:
            events = self._events.feed(chunk)
        except EngineProtocolError:
            self._unreadable = True
            return
        for data in events:
            self._quietly(self._reader.event, data)

    def _quietly(self, read: Callable[[bytes], None], data: bytes) -> None:
        try:
            read(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest):
            self._unreadable = True
