"""A TCP relay between two processes, that can be made slow or cut what passes into small pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass(eq=False)
class Relay:
    """`delay_s` is added to every piece that comes back from the target, `piece` the bytes that pass at a time."""

    host: str
    port: int
    piece: int = 65_536
    delay_s: float = 0.0
    own_port: int = 0
    is_cut: bool = False
    is_silent: bool = False
    flowing: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is cleared, what comes waits, as on a link whose packets are lost and sent again."""

    _generation: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.flowing.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers = [one for one in self._writers if not one.is_closing()]
        self._writers.append(writer)
        if self.is_cut:
            writer.transport.abort()
            return
        if self.is_silent:
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(self.host, self.port)
        except ConnectionError:
            writer.close()
            return
        self._writers.append(there_writer)
        for task in (self._pass(reader, there_writer, back=False), self._pass(there_reader, writer, back=True)):
            running = asyncio.create_task(task)
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool) -> None:
        generation = self._generation
        with suppress(ConnectionError):
            while data := await reader.read(self.piece if back else 65_536):
                if generation != self._generation:
                    await asyncio.Event().wait()
                if back and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self.flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def vanish(self) -> None:
        """Nothing passes over the connections of now any more, and nobody is told; new ones are made as before."""
        self._generation += 1

    def hush(self) -> None:
        """Nothing passes any more, over new connections neither, until `is_silent` is False again: packets are lost."""
        self.is_silent = True
        self.vanish()

    def cut(self) -> None:
        """All connections are reset, and so is every new one, until `is_cut` is False again."""
        self.is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def end(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)  # transports close in the loop's next turn


@asynccontextmanager
async def relayed(host: str, port: int, *, piece: int = 65_536) -> AsyncIterator[Relay]:
    """A relay to `host:port` on a free port of the loopback."""
    relay = Relay(host, port, piece)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    relay.own_port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.end()
