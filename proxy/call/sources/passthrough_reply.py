"""Parses a vendor's reply while its bytes are relayed.

A dialect's reader turns bodies and events into the assistant's message, in the form that the dialect parses when the
harness sends the message back. The next call finds its parent by it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from rolltap.errors import EngineProtocolError, InvalidRequest
from rolltap.protocols.base import ReplyReader
from rolltap.protocols.conversation import Choice, Usage
from rolltap.proxy.engines.http import error_text
from rolltap.proxy.engines.sse import SseParser

MAX_BODY = 64 << 20
"""Bytes of a reply that is no stream that are kept for parsing."""

MAX_ERROR_BYTES = 65_536
"""Bytes of an error's body that are searched for its message."""


class RelayedReplyReader:
    """Parses a relayed reply and decides which of its bytes must wait until the call is recorded.

    A stream is withheld from the event that clients may accept as its end; any other reply from its last chunk.
    """

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._status = 0  # no head yet
        self._events: SseParser | None = None
        self._body = bytearray()
        self._withheld: list[bytes] = []
        self._unreadable = False

    def begin(self, status: int, *, streamed: bool) -> None:
        """Takes the reply's status. Only a reply without error is parsed as a stream."""
        self._status = status
        self._events = SseParser() if streamed and status < 300 else None

    @property
    def streamed(self) -> bool:
        return self._events is not None

    def pass_on(self, chunk: bytes) -> bytes:
        """Takes a chunk; returns the bytes that may go to the client now."""
        self._withheld.append(chunk)
        if self._events is None:
            limit = MAX_BODY if self._status < 300 else MAX_ERROR_BYTES
            self._body += chunk[: limit - len(self._body)]
            ready, self._withheld = b"".join(self._withheld[:-1]), self._withheld[-1:]
            return ready
        self._read_events(chunk)
        return b"" if self._reader.closing else self.rest()

    def rest(self) -> bytes:
        """The withheld bytes."""
        withheld, self._withheld = b"".join(self._withheld), []
        return withheld

    def end(self) -> None:
        """Parses a whole reply: the vendor has sent everything."""
        if self._events is None and self._status < 300:
            self._try_read(self._reader.whole, bytes(self._body))

    @property
    def ended(self) -> bool:
        """Whether the reply is complete, as far as it can be parsed."""
        return self._reader.ended or self._unreadable

    @property
    def problem(self) -> str:
        """Why the call is not completed; empty if it is. The vendor's message about a refused key is left out."""
        if self._status in (401, 403):
            return f"the vendor answered {self._status}"
        if self._status and not 200 <= self._status < 300:
            return f"the vendor answered {self._status}: {error_text(self._body.decode('utf-8', 'replace'))}"
        if self._reader.error:
            return f"the vendor reported: {self._reader.error}"
        return "" if self.ended else "the vendor's stream ended before its last event"

    @property
    def usage(self) -> Usage | None:
        return self._reader.usage

    def choice(self) -> Choice | None:
        """The assistant's message so far; None if it cannot be parsed or is empty."""
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
            self._try_read(self._reader.event, data)

    def _try_read(self, read: Callable[[bytes], None], data: bytes) -> None:
        try:
            read(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest):
            self._unreadable = True
