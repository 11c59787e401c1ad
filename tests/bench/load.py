"""A closed-loop load generator: each connection sends its next request when its reply has ended.

Raw asyncio protocols and requests serialised before the clock starts: the generator must not be the limit. A frame is
one `~` (see `canned_engine`). Every reply is checked: its status, its frames and its terminal event.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import msgspec

PATH = "/v1/chat/completions"
SYSTEM = "You are a careful coding agent. "
LINE = "Look at the next file and say what you would change in it. "
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "shell", "description": "Run a command.", "parameters": PARAMETERS}}]


@dataclass(frozen=True, slots=True)
class Load:
    """What the connections send, and for how long: `seconds`, or `calls` where that comes first.

    A conversation of `turns` starts again when it has ended; each turn adds `turn_bytes` of a user's message and the
    engine's reply, `reply`. `frames` is what each reply must hold.
    """

    connections: int
    seconds: float = 2.0
    calls: int = 1_000_000
    stream: bool = False
    turns: int = 1
    turn_bytes: int = 256
    frames: int = 32
    reply: str = "~" * 32
    model: str = "canned"
    stagger_s: float = 0.0


@dataclass(slots=True)
class LoadResult:
    """Times in seconds. `errors` counts by kind; `calls` are the replies that ended within the time."""

    replies: int = 0
    calls: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    """From a request to the first frame of its stream."""
    gaps: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.seconds


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def bodies(load: Load) -> list[bytes]:
    """The requests of one conversation."""
    filler = (LINE * (load.turn_bytes // len(LINE) + 1))[: load.turn_bytes]
    messages = [{"role": "system", "content": SYSTEM}]
    requests = []
    for turn in range(load.turns):
        messages.append({"role": "user", "content": f"{turn}: {filler}"})
        request = {"model": load.model, "messages": messages, "tools": TOOLS, "max_tokens": 2048, "stream": load.stream}
        requests.append(msgspec.json.encode(request))
        messages.append({"role": "assistant", "content": load.reply})
    return requests


class Connection(asyncio.Protocol):
    """One session's connection: sends, parses, keeps the times."""

    def __init__(self, run: Run, requests: Sequence[bytes]) -> None:
        self._run, self._requests = run, requests
        self._transport: asyncio.Transport | None = None
        self._turn = 0
        self.idle = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports have no common base class
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.idle.done():
            self._run.result.errors["connection lost"] += 1
            self.idle.set_result(None)

    def _send(self) -> None:
        if self._transport is None or not self._run.take():
            self.close()
            return
        self._head, self._tail = b"", b""
        self._left: int | None = None  # bytes of the body; None while the head comes, and where it is chunked
        self._in_body, self._frames, self._last = False, 0, 0.0
        self._start = time.perf_counter()
        self._transport.write(self._requests[self._turn])
        self._turn = (self._turn + 1) % len(self._requests)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self._in_body:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            self._in_body = True
            self._status = int(head[9:12])
            _, name, value = head.lower().partition(b"\r\ncontent-length:")
            self._left = int(value.partition(b"\r\n")[0]) if name else None
        self._count(data, now)
        if self._left is not None:
            self._left -= len(data)
        self._tail = (self._tail + data)[-32:]
        if self._left == 0 or (self._left is None and self._tail.endswith(b"\n0\r\n\r\n")):
            self._end(now)

    def _count(self, data: bytes, now: float) -> None:
        frames = data.count(b"~")
        if frames and self._run.load.stream:
            if self._frames:
                self._run.result.gaps += [now - self._last, *[0.0] * (frames - 1)]
            else:
                self._run.result.firsts.append(now - self._start)
            self._last = now
        self._frames += frames

    def _end(self, now: float) -> None:
        load, errors = self._run.load, self._run.result.errors
        if self._status != 200:
            errors[f"status {self._status}"] += 1
        elif self._frames != load.frames:
            errors["frames lost"] += 1
        elif load.stream and b"[DONE]" not in self._tail:
            errors["no terminal event"] += 1
        self._run.ended(now - self._start, now)
        self._send()

    def close(self) -> None:
        if not self.idle.done():
            self.idle.set_result(None)
        if self._transport:
            self._transport.close()


class Run:
    """One load against one address, with a key for each connection."""

    def __init__(self, url: str, keys: Sequence[str], load: Load) -> None:
        self.load, self.result = load, LoadResult()
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 80
        self._left = load.calls
        payloads = bodies(load)
        self._requests = [[self._request(key, body) for body in payloads] for key in keys[: load.connections]]

    def _request(self, key: str, body: bytes) -> bytes:
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def take(self) -> bool:
        """Counts one more call, if it may still start."""
        if self._left == 0 or time.perf_counter() >= self._deadline:
            return False
        self._left -= 1
        return True

    def ended(self, latency: float, now: float) -> None:
        self.result.replies += 1
        if now <= self._deadline:
            self.result.calls += 1
            self.result.latencies.append(latency)
            self._last_end = now

    async def __call__(self, grace_s: float = 30.0) -> LoadResult:
        loop = asyncio.get_running_loop()
        start = self._last_end = time.perf_counter()
        self._deadline = start + self.load.seconds
        connections = []
        for requests in self._requests:
            connection = Connection(self, requests)
            connections.append(connection)
            await loop.create_connection(lambda connection=connection: connection, self._host, self._port)
            await asyncio.sleep(self.load.stagger_s / self.load.connections)
        _, late = await asyncio.wait(
            [connection.idle for connection in connections], timeout=self.load.seconds + grace_s
        )
        self.result.errors["unfinished"] += len(late)
        for connection in connections:
            connection.close()
        self.result.seconds = (self._last_end if self._left == 0 else self._deadline) - start
        return self.result
