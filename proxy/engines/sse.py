"""Server-sent events out of bytes as they come, whatever their cut.

Covers what model servers send (WHATWG HTML, "Server-sent events"): `data` fields, several of them joined by a
newline; comments and other fields are passed over; lines end in LF or CRLF. `feed` never gives out an event
that the stream's end cuts off.
"""

from __future__ import annotations

from rolltap.errors import EngineProtocolError

MAX_LINE_BYTES = 256 << 20


class SseParser:
    """`feed` bytes, get the `data` of every event that they complete."""

    __slots__ = ("_data", "_limit", "_rest", "_size")

    def __init__(self, limit: int = MAX_LINE_BYTES) -> None:
        self._limit = limit
        self._rest: list[bytes] = []  # an unfinished line, in pieces
        self._size = 0
        self._data: list[bytes] = []  # the lines of an unfinished event

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events completed by `chunk`, in order; `EngineProtocolError` if a line grows over the limit."""
        if not self.pending and chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") and b"\r" not in chunk:
            events = chunk[6:-2].split(b"\n\ndata: ")
            if not any(b"\n" in event for event in events):  # whole events of one line each, as servers send them
                return events
        if b"\n" not in chunk:
            self._hold(chunk)
            return []
        if self._rest:
            chunk = b"".join((*self._rest, chunk))
            self._rest.clear()
        lines = chunk.split(b"\n")
        last = lines.pop()
        self._size = 0
        events: list[bytes] = []
        for line in lines:
            self._line(line[:-1] if line.endswith(b"\r") else line, events)
        self._hold(last)
        return events

    def last(self) -> list[bytes]:
        """The event that the stream's end cut off, if there is one. It may lack no more than its empty line."""
        if not self.pending:
            return []
        return self.feed(b"\n\n")

    @property
    def pending(self) -> bool:
        """Whether an event has begun that is not complete."""
        return bool(self._data or self._size)

    def _hold(self, piece: bytes) -> None:
        if piece:
            self._rest.append(piece)
            self._size += len(piece)
            if self._size > self._limit:
                raise EngineProtocolError(f"the engine sent a line of over {self._limit} bytes")

    def _line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data.clear()
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            self._data.append(b"")
