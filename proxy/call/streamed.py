"""A reply that is sent as it grows: opened by the first thing there is to say, kept alive through silence.

Opening a stream settles its status, so a later failure can only cut it. A reply is therefore opened by its first event,
or by a silence long enough that clients would begin to give up.
"""

from __future__ import annotations

from rolltap.proxy.call.http_exchange import Exchange
from rolltap.proxy.conversation.chat import ReplyEnded, ReplyEvent, ReplyStarted
from rolltap.proxy.dialects.base import ReplyWriter


class StreamedReply:
    """One call's stream to one client."""

    def __init__(self, exchange: Exchange, writer: ReplyWriter, started: ReplyStarted) -> None:
        self._exchange = exchange
        self._writer = writer
        self._opening = writer.write(started)

    async def say(self, event: ReplyEvent) -> None:
        """The event's frames, if it has any."""
        await self._send(self._writer.write(event))

    async def keep_alive(self) -> None:
        """What this dialect's clients take for a sign of life; nothing for those that survive none."""
        await self._send(self._writer.keep_alive())

    async def end(self, event: ReplyEnded) -> None:
        """The terminal frames and the body's end."""
        await self._open()
        await self._exchange.end(self._writer.write(event))

    async def _send(self, frames: bytes) -> None:
        if frames:
            await self._open()
            await self._exchange.write(frames)

    async def _open(self) -> None:
        if not self._exchange.started:
            await self._exchange.start_stream(self._writer.content_type)
            if self._opening:
                await self._exchange.write(self._opening)
