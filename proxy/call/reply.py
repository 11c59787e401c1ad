"""Writes a reply to one client: as a stream while it grows, or complete at its end.

Once a stream is open its status is sent, so a later failure can only cut the connection. A stream therefore opens with
its first event, or with the first keep-alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rolltap.protocols.base import Dialect, WireReply
from rolltap.protocols.conversation import ReasoningDelta, TextDelta, ToolCallDelta
from rolltap.proxy.call.http_exchange import HttpExchange
from rolltap.proxy.call.policy import CallEvent, ClientReply, RepliedRequest

JSON = {"content-type": "application/json"}


class WholeReply:
    """A reply in one piece."""

    def __init__(self, http: HttpExchange, dialect: Dialect, replied: RepliedRequest) -> None:
        self._http = http
        self._dialect = dialect
        self._replied = replied

    async def send(self, events: Sequence[CallEvent]) -> None: ...

    def put(self, events: Sequence[CallEvent]) -> bool:
        return True

    async def keep_alive(self) -> None: ...

    async def end(self) -> None:
        replied = self._replied
        await self._http.reply(
            WireReply(200, self._dialect.reply(replied.request, replied.started, replied.ended), JSON)
        )


class StreamedReply:
    """A reply as a stream of the dialect's events."""

    def __init__(self, http: HttpExchange, dialect: Dialect, replied: RepliedRequest) -> None:
        self._http = http
        self._replied = replied
        self._writer = dialect.writer(replied.request)
        self._opening = self._writer.write(replied.started)

    async def send(self, events: Sequence[CallEvent]) -> None:
        await self._write(self._written(events))

    def put(self, events: Sequence[CallEvent]) -> bool:
        if not self._http.takes_parts:
            return False
        self._http.put(self._writer.write(events[0]) if len(events) == 1 else self._written(events))  # type: ignore[arg-type]
        return True

    async def keep_alive(self) -> None:
        await self._write(self._writer.keep_alive())

    async def end(self) -> None:
        await self._open()
        await self._http.end(self._writer.write(self._replied.ended))

    def _written(self, events: Sequence[CallEvent]) -> bytes:
        write = self._writer.write
        return b"".join([write(event) for event in merge_deltas(events)])  # type: ignore[arg-type]

    async def _write(self, data: bytes) -> None:
        if data:
            await self._open()
            await self._http.write(data)

    async def _open(self) -> None:
        if not self._http.started:
            await self._http.start_stream(self._writer.content_type)
            if self._opening:
                await self._http.write(self._opening)


def dialect_reply(http: HttpExchange, dialect: Dialect, replied: RepliedRequest) -> ClientReply:
    """A streamed or a whole reply, as the client asked."""
    return (StreamedReply if replied.request.stream else WholeReply)(http, dialect, replied)


def merge_deltas(events: Sequence[CallEvent]) -> Sequence[CallEvent]:
    """Joins neighbouring deltas of the same channel. Deltas gather while the client reads slowly."""
    if len(events) < 2:
        return events
    merged: list[CallEvent] = []
    for key, group in groupby(events, key=_channel):
        deltas = list(group)
        first = deltas[0]
        if key is None or len(deltas) == 1:
            merged += deltas
        elif isinstance(first, ToolCallDelta):
            arguments = "".join([delta.arguments for delta in deltas])  # type: ignore[union-attr]
            merged.append(ToolCallDelta(first.position, arguments, first.index))
        else:
            kind = type(first)
            merged.append(kind("".join([delta.text for delta in deltas]), first.index))  # type: ignore[union-attr, call-arg]
    return merged


def _channel(event: CallEvent) -> tuple[type, int, int] | None:
    """The channel that a delta belongs to; None for other events."""
    if isinstance(event, TextDelta | ReasoningDelta):
        return type(event), event.index, -1
    return (ToolCallDelta, event.index, event.position) if isinstance(event, ToolCallDelta) else None
