"""The floor: the least that a Python proxy with a durable record does. `python -m tests.bench.floor --help`.

A plain ASGI endpoint under uvicorn, with a pooled aiohttp client; nothing is parsed. With `--record FILE` each call
leaves two rows in SQLite (WAL, `synchronous=FULL`): the intent is durable before the engine is called, the completion
before the reply's last bytes leave. Rows are committed in groups: while one fsync is under way, the next rows gather.
Without `--record` it only forwards.
"""

from __future__ import annotations

import argparse
import asyncio
import queue
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn

FORWARDED = (b"content-type", b"authorization", b"accept")
ROWS_A_COMMIT = 512
SCHEMA = "CREATE TABLE calls (id INTEGER PRIMARY KEY, key TEXT, stage TEXT, at REAL, body BLOB)"
INSERT = "INSERT INTO calls (key, stage, at, body) VALUES (?, ?, ?, ?)"

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Row:
    key: str
    stage: str
    body: bytes
    at: float = field(default_factory=time.time)


class Record:
    """Rows in one SQLite file, written by one thread. `append` returns when its row is on the disk."""

    def __init__(self, path: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[Row, asyncio.Future[None]]] = queue.SimpleQueue()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute(SCHEMA)
        threading.Thread(target=self._write, daemon=True).start()

    async def append(self, row: Row) -> None:
        durable = self._loop.create_future()
        self._queue.put((row, durable))
        await durable

    def _write(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < ROWS_A_COMMIT and not self._queue.empty():
                batch.append(self._queue.get())
            self._database.execute("BEGIN")
            self._database.executemany(INSERT, [(row.key, row.stage, row.at, row.body) for row, _ in batch])
            self._database.execute("COMMIT")
            self._loop.call_soon_threadsafe(release, [durable for _, durable in batch])


def release(futures: list[asyncio.Future[None]]) -> None:
    for durable in futures:
        if not durable.cancelled():
            durable.set_result(None)


class NoRecord:
    """Keeps nothing."""

    async def append(self, row: Row) -> None: ...


class Forwarder:
    """An ASGI application that sends every POST on to one engine."""

    def __init__(self, engine: str, record: Path | None) -> None:
        self._engine, self._path = engine, record

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["method"] == "POST":
            await self._forward(scope, await body_of(receive), send)
        else:
            await reply(send, 200, b"text/plain", b"")

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        self._record: Record | NoRecord = Record(self._path) if self._path else NoRecord()
        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._engine, connector=connector, timeout=timeout) as self._client:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})

    async def _forward(self, scope: MutableMapping[str, Any], body: bytes, send: Send) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name in FORWARDED}
        key = headers.get("authorization", "")
        await self._record.append(Row(key, "intent", body))
        async with self._client.post(scope["path"], data=body, headers=headers) as upstream:
            kind = upstream.headers["content-type"].encode()
            if upstream.content_length is not None:
                content = await upstream.read()
                await self._record.append(Row(key, "completion", content))
                await reply(send, upstream.status, kind, content)
                return
            await self._stream(upstream, key, kind, send)

    async def _stream(self, upstream: aiohttp.ClientResponse, key: str, kind: bytes, send: Send) -> None:
        """Frames as they come; from the terminal one on they are withheld until the call is durable."""
        await send({"type": "http.response.start", "status": upstream.status, "headers": [(b"content-type", kind)]})
        parts, withheld = [], b""
        async for data in upstream.content.iter_any():
            parts.append(data)
            if withheld or b"[DONE]" in data:
                withheld += data
            else:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await self._record.append(Row(key, "completion", b"".join(parts)))
        await send({"type": "http.response.body", "body": withheld})


async def body_of(receive: Receive) -> bytes:
    message = await receive()
    parts = [message["body"]]
    while message.get("more_body"):
        message = await receive()
        parts.append(message["body"])
    return b"".join(parts)


async def reply(send: Send, status: int, kind: bytes, content: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def serve(port: int, engine: str, record: Path | None) -> None:
    uvicorn.run(
        Forwarder(engine, record),
        port=port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", required=True, help="its URL")
    parser.add_argument("--record", type=Path, help="the SQLite file, which must not exist")
    arguments = parser.parse_args()
    serve(arguments.port, arguments.engine, arguments.record)
