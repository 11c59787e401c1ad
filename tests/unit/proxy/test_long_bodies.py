"""Long bodies, and bodies of many values, cost their own sender and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rolltap.errors import BodyTooLarge, RateLimited
from rolltap.protocols.base import WireReply
from rolltap.protocols.cache_space import CacheSpace, WeighedCache
from rolltap.proxy.call import body_reader
from rolltap.proxy.call.body_reader import MOST_VALUES, BodyRoom, count_values
from rolltap.proxy.call.http_exchange import ClientGone, HttpExchange, RequestTimeout
from rolltap.settings import LimitSettings
from rolltap.tokenizer import HubTokenizer
from rolltap.types import Outcome
from tests.unit.proxy.conftest import make_plane
from tests.unit.proxy.test_event_loop import longest_stall
from tests.unit.proxy.test_front import head, served

HELLO = {"role": "user", "content": "hello"}


def messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number} " + "some words " * 20} for number in range(count)]


async def test_a_long_body_is_read_beside_the_loop(tokenizer: HubTokenizer) -> None:
    plane = await make_plane(tokenizer, LimitSettings(body_mb=50))
    whole = {"model": "tiny", "messages": [*messages(40_000), {"role": "nobody"}]}
    started = time.perf_counter()
    refusal = await plane.client.post("/v1/chat/completions", whole)
    alone = time.perf_counter() - started
    assert refusal.status == 400
    assert "messages[40000].role" in refusal.json()["error"]["message"]
    body, stall, tries = json.dumps(whole).encode().replace(b"some", b"same"), float("inf"), 0
    while stall >= max(0.05, alone / 4) and tries < 10:  # other processes stall the loop, too, but not every time
        body = body.replace(b" words", b" more words" if tries % 2 else b" words and")  # nothing of it is known
        _, _, reading = plane.client.start("/v1/chat/completions", body)
        stall, tries = min(stall, await longest_stall(reading)), tries + 1
    print(f"{len(body) / 1e6:.0f} MB read in {alone * 1000:.0f} ms; longest stall {stall * 1000:.0f} ms")
    assert stall < max(0.05, alone / 4)


MANY = "[" + "[]," * MOST_VALUES + "[]]"
TOOL = {"name": "f", "parameters": {"type": "object", "x": "MANY"}}
BOMBS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/chat/completions", {"model": "tiny", "messages": "MANY"}),
    "metadata": ("/v1/chat/completions", {"model": "tiny", "messages": [HELLO], "metadata": {"a": "MANY"}}),
    "tools": ("/v1/chat/completions", {"model": "tiny", "messages": [HELLO], "tools": [{"function": TOOL}]}),
    "anthropic": ("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": [HELLO], "metadata": "MANY"}),
    "responses": ("/v1/responses", {"model": "tiny", "input": "MANY"}),
    "gemini": ("/v1beta/models/tiny:generateContent", {"contents": "MANY"}),
    "completions": ("/v1/completions", {"model": "tiny", "prompt": "MANY"}),
}


@pytest.mark.parametrize("shape", BOMBS)
async def test_a_body_of_too_many_values_is_refused_unread(tokenizer: HubTokenizer, shape: str) -> None:
    plane = await make_plane(tokenizer, LimitSettings(body_mb=50))
    path, body = BOMBS[shape]
    answer = await plane.client.post(path, json.dumps(body).replace('"MANY"', MANY).encode())
    assert answer.status == 413
    assert "more than 500,000 values" in answer.json()["error"]["message"]
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.REFUSED


async def test_text_is_one_value_whatever_it_holds(tokenizer: HubTokenizer) -> None:
    plane = await make_plane(tokenizer, LimitSettings(body_mb=50))
    source = 'a = [{"k": 1}, {}, [], "\\\\"],\n' * 60_000
    answer = await plane.client.chat({"role": "user", "content": source}, model="another")
    assert answer.status == 404  # it was read: only the model is not known
    assert (await plane.client.chat(HELLO)).status == 200


LAYOUTS: list[dict[str, Any]] = [{}, {"indent": 1}, {"separators": (",", ":"), "ensure_ascii": False}]


def value_of(dice: random.Random, depth: int) -> Any:
    kind = dice.randrange(6 if depth else 3)
    if kind < 3:
        return dice.choice(["", '"\\', 'a,[{"x', "\\\\", " ", "[]", "{}", 1.5, None, True, "é\n"])
    if kind < 5:
        return [value_of(dice, depth - 1) for _ in range(dice.randrange(5))]
    return {f"{number}" + dice.choice('"\\[,'): value_of(dice, depth - 1) for number in range(dice.randrange(4))}


def values_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(values_of, inner))


@pytest.mark.parametrize("piece", [1, 2, 3, 17, body_reader.PIECE_BYTES])
def test_values_are_counted_as_a_parser_counts_them(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A border between two pieces may make an empty list count as one value more."""
    monkeypatch.setattr(body_reader, "PIECE_BYTES", piece)
    dice = random.Random(7)
    for _ in range(300):
        value = value_of(dice, 6)
        for layout in LAYOUTS:
            raw = json.dumps(value, **layout).encode()
            counted, spare = count_values(raw, len(raw)), 0 if piece > len(raw) else raw.count(b"]") + raw.count(b"}")
            assert values_of(value) <= counted <= values_of(value) + spare


async def test_a_keys_long_bodies_wait_for_room_in_their_order() -> None:
    room = BodyRoom(body_mb=1)
    first, second = await room.reserve("k", 1_000_000, 9), await room.reserve("k", 900_000, 9)
    large, small = (asyncio.create_task(room.reserve("k", size, 9)) for size in (1_000_000, 100_000))
    other = await room.reserve("another", 1_000_000, 9)
    with pytest.raises(RateLimited, match=r"2 MB in long bodies now, twice limits\.body_mb \(1\)"):
        await room.reserve("k", 1_000_000, 0)
    assert not large.done()
    assert not small.done()  # there is room for it, but it is not first
    second.shrink(500_000)
    assert not large.done()
    first.release()
    first.release()
    holding = [await large, await small]
    for held in (second, other, *holding):
        held.release()
    assert room._rooms == {}


async def test_who_gives_up_lets_those_behind_in() -> None:
    room = BodyRoom(body_mb=1)
    first = await room.reserve("k", 1_000_000, 9)
    await room.reserve("k", 900_000, 9)
    leaving, small = (asyncio.create_task(room.reserve("k", size, 9)) for size in (1_000_000, 100_000))
    await asyncio.sleep(0)
    leaving.cancel()
    await small
    first.release()
    await room.reserve("k", 1_000_000, 0)


async def test_bodies_on_their_way_hold_room(tmp_path: Path) -> None:
    """Two of the largest size, which don't come to their end, leave no room for a third of the key; only for others."""
    async with served(tmp_path, receipt_s=6) as there:
        (_, key), (_, other) = [await there.app.services.sessions.open() for _ in range(2)]

        def request(key: str) -> str:
            return head("agent", f"Authorization: Bearer {key}", "Content-Length: 500000", "Connection: close")

        held = [await there.open("agent") for _ in range(2)]
        for _, writer in held:
            writer.write(request(key).replace("\n", "\r\n").encode() + b" " * 100_000)
            await writer.drain()
        rooms = there.app.planes["agent"]._room._rooms
        async with asyncio.timeout(20):
            while [room.used for room in rooms.values()] != [1_000_000]:  # noqa: ASYNC110  no event says so
                await asyncio.sleep(0.01)
        sent = asyncio.create_task(there.exchange("agent", request(key), b"x" * 500_000))
        assert (await there.exchange("agent", request(other), b"x" * 500_000))[0] == 400
        status, answer = await sent
        assert status == 429
        assert b"limits.body_mb (0.5)" in answer
        for _, writer in held:
            writer.close()


def test_caches_may_be_used_in_several_threads() -> None:
    space = CacheSpace(100_000)
    caches: list[WeighedCache[int, bytes]] = [WeighedCache(len, space) for _ in range(3)]
    done: list[int] = []
    interval = sys.getswitchinterval()

    def work(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(4000):
            cache, key = dice.choice(caches), dice.randrange(200)
            cache.get(key, lambda key: bytes(key * 10))
            cache.known(range(key, key + 5))
            cache.items()
            if key % 3 == 0:
                cache.pop(key)
            assert space.size <= space.limit + 20_000
        done.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(done) == [0, 1, 2, 3]
    assert space._size == space.size == sum(600 + len(value) for cache in caches for _, value in cache.items())
    assert space.size <= space.limit


@pytest.mark.parametrize(("wanted", "least", "most"), [(False, 1 << 20, 2 << 20), (True, 64 << 20, 65 << 20)])
async def test_less_of_a_refused_body_is_read_where_it_was_never_wanted(wanted: bool, least: int, most: int) -> None:
    read = 0

    async def receive() -> Any:
        nonlocal read
        read += 1 << 16
        return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}

    async def send(message: Any) -> None: ...

    http = HttpExchange({"headers": [(b"transfer-encoding", b"chunked")]}, receive, send)
    if wanted:
        with pytest.raises(BodyTooLarge):
            await http.body(1, 5)
    await http.refuse(WireReply(413, b"", {}))
    assert least <= read < most


@pytest.mark.parametrize("late", list(itertools.product((False, True), repeat=3)))
@pytest.mark.parametrize("end", ["whole", "gone", "silent"])
async def test_a_body_arrives_in_pieces_of_which_any_is_late(late: tuple[bool, ...], end: str) -> None:
    pieces: asyncio.Queue[Any] = asyncio.Queue()
    sent: list[Any] = [{"type": "http.request", "body": b"%d" % at, "more_body": True} for at in range(2)]
    sent += {
        "whole": [{"type": "http.request", "body": b"2", "more_body": False}],
        "gone": [{"type": "http.disconnect"}],
        "silent": [],
    }[end]

    async def arrive() -> None:
        for message, is_late in zip(sent, late, strict=False):
            if is_late:
                await asyncio.sleep(0.01)
            pieces.put_nowait(message)

    http = HttpExchange({"headers": [(b"transfer-encoding", b"chunked")]}, pieces.get, AsyncMock())
    arrival = asyncio.create_task(arrive())
    if not late[0]:
        await asyncio.sleep(0)  # the first piece is here before the body is asked for
    expected: Any = {"whole": contextlib.nullcontext(), "gone": pytest.raises(ClientGone)}
    with expected.get(end) or pytest.raises(RequestTimeout):
        assert await http.body(100, 0.1) == b"012"
    await arrival
    assert http.gone is (end == "gone")
    assert http.received_bytes == (3 if end == "whole" else 2)
