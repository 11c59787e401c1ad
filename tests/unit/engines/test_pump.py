"""A stream that is read inside the connection's callback: cut anywhere, ended, failing, given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from rolltap.errors import EngineProtocolError, EngineUnavailable
from rolltap.proxy.engines.connections import Connections, _Connection
from rolltap.proxy.engines.http import EngineHttp
from rolltap.settings import EngineSettings

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = ('{"text": "zwölf 🙂"}'.encode(), b'{"a": 1}', b'{"b": 2}')


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


STREAM = (
    HEAD
    + b"".join(chunk(b"data: " + event + b"\n\n") for event in EVENTS)
    + chunk(b": comment\n\ndata: [DONE]\n\n")
    + b"0\r\n\r\n"
)


class Wire:
    """A connection's transport, which the test feeds by the byte."""

    def __init__(self) -> None:
        self.protocol: Any = None
        self.asked = asyncio.Event()
        self.aborted = self.paused = False

    def write(self, data: bytes) -> None:
        self.asked.set()

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_extra_info(self, name: str) -> None:
        return None

    def arrives(self, *pieces: bytes) -> None:
        for piece in pieces:
            if not self.aborted:
                self.protocol.data_received(piece)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()

    async def connect(pool: Connections) -> _Connection:
        wire.protocol = _Connection(pool)
        wire.protocol.connection_made(wire)
        return wire.protocol

    monkeypatch.setattr(Connections, "_connect", connect)
    return wire


Take = Callable[[list[bytes]], bool]


async def streamed(wire: Wire, take: Take) -> asyncio.Task[bool]:
    """The task of a stream whose request is sent."""
    http = EngineHttp("main", EngineSettings(url="http://engine"))
    task = asyncio.create_task(http.stream("/generate", {}, take))
    await wire.asked.wait()
    return task


def into(taken: list[bytes]) -> Take:
    def take(events: Sequence[bytes]) -> bool:
        taken.extend(events)
        return True

    return take


@pytest.mark.parametrize("step", [1, 2, 3, 7])
async def test_a_stream_may_be_cut_anywhere(wire: Wire, step: int) -> None:
    taken: list[bytes] = []
    task = await streamed(wire, into(taken))
    for piece in (STREAM[at : at + step] for at in range(0, len(STREAM), step)):
        wire.arrives(piece)
        if len(piece) % 2:  # the task runs between some of the reads
            await asyncio.sleep(0)
    assert await task is True
    assert taken == list(EVENTS)
    assert not wire.aborted  # the connection is kept


@pytest.mark.parametrize("in_the_head", [True, False])
async def test_every_single_cut(wire: Wire, in_the_head: bool) -> None:
    for cut in range(1, len(HEAD)) if in_the_head else range(len(HEAD), len(STREAM)):
        taken: list[bytes] = []
        wire.asked.clear()
        task = await streamed(wire, into(taken))
        wire.arrives(*(STREAM[start:end] for start, end in pairwise((0, cut, len(STREAM)))))
        assert await task is True, cut
        assert taken == list(EVENTS), cut


async def test_events_are_taken_inside_the_read(wire: Wire) -> None:
    taken: list[bytes] = []
    task = await streamed(wire, into(taken))
    wire.arrives(HEAD)
    for _ in range(3):
        await asyncio.sleep(0)
    wire.arrives(chunk(b"data: 1\n\n"))
    assert taken == [b"1"]  # no task ran since
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("error", [EngineProtocolError("of another shape"), ValueError("a defect")])
async def test_what_fails_inside_the_read_fails_in_the_task(wire: Wire, error: Exception) -> None:
    taken: list[bytes] = []

    def take(events: list[bytes]) -> bool:
        taken.extend(events)
        raise error

    task = await streamed(wire, take)
    wire.arrives(HEAD, chunk(b"data: 1\n\n"))
    await asyncio.sleep(0)
    wire.arrives(chunk(b"data: 2\n\n"))
    with pytest.raises(type(error), match=str(error)):
        await task
    assert taken in ([b"1"], [b"1", b"2"])  # they may have come together; nothing was taken after the failure
    assert wire.aborted


async def test_nothing_is_taken_after_the_last_that_was_wanted(wire: Wire) -> None:
    taken: list[bytes] = []

    def take(events: list[bytes]) -> bool:
        taken.extend(events)
        return False

    task = await streamed(wire, take)
    wire.arrives(HEAD)
    for _ in range(3):
        await asyncio.sleep(0)
    wire.arrives(chunk(b"data: 1\n\n"), chunk(b"data: 2\n\n"))
    assert await task is False
    assert taken == [b"1"]
    assert wire.aborted


async def test_giving_up_in_the_middle_of_an_event_takes_no_more(wire: Wire) -> None:
    taken: list[bytes] = []
    task = await streamed(wire, into(taken))
    wire.arrives(HEAD, chunk(b'data: {"half'))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    wire.arrives(chunk(b": 1}\n\n")[:4])
    with pytest.raises(asyncio.CancelledError):
        await task
    wire.protocol.data_received(chunk(b"data: 2\n\n"))  # it was on its way
    assert taken == []
    assert wire.aborted


@pytest.mark.parametrize("broken", [False, True])
async def test_what_came_before_the_connection_was_lost_is_taken(wire: Wire, broken: bool) -> None:
    taken: list[bytes] = []
    task = await streamed(wire, into(taken))
    wire.arrives(HEAD)
    for _ in range(3):
        await asyncio.sleep(0)
    if broken:
        wire.arrives(chunk(b"data: 1\n\n") + b"no size\r\n")
    else:
        wire.arrives(chunk(b"data: 1\n\n"))
        wire.protocol.connection_lost(None)
    with pytest.raises(EngineUnavailable):
        await task
    assert taken == [b"1"]


async def test_a_server_that_was_held_back_goes_on(wire: Wire) -> None:
    """Much may arrive before the task runs. Then the connection is not read until it does."""
    taken: list[bytes] = []
    task = await streamed(wire, into(taken))
    event = b"x" * (1 << 20)
    wire.arrives(HEAD, *[chunk(b"data: " + event + b"\n\n")] * 3)
    assert wire.paused
    for _ in range(3):
        await asyncio.sleep(0)
    assert not wire.paused
    wire.arrives(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    assert await task is True
    assert taken == [event] * 3
