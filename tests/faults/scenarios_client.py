"""The harness goes away, repeats itself, or sends what it should not."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.types import Outcome

from .clients import Messages, turn
from .world import World

SAY = "one two three four five six"


async def _calls(world: World, session: str) -> list[dict[str, Any]]:
    return (await world.clients.admin(f"/read/sessions/{session}", method="GET"))["calls"]


async def _settled(world: World, session: str) -> list[dict[str, Any]]:
    """The session's calls once none is open; what a client left is recorded soon after it left."""
    async with asyncio.timeout(20):
        while True:
            calls = await _calls(world, session)
            if calls and all(call["outcome"] != "open" and call["delivered"] is not None for call in calls):
                return calls
            await asyncio.sleep(0.02)


async def _served(world: World, call_id: str) -> dict[str, Any]:
    """The engine's entry of the call once it is over; the engine is told in the background that a client left."""
    async with asyncio.timeout(20):
        while True:
            entry = next(entry for entry in await world.journal() if entry["id"] == call_id)
            if entry["outcome"] != "running":
                return entry
            await asyncio.sleep(0.02)


async def goes_away(world: World) -> None:
    """The client hangs up after k frames, for every k: the engine is told, the call ends as aborted and undelivered."""
    clients = world.clients

    async def leave(frames: int) -> None:
        key = await clients.open_session()
        asked = turn(f"say {frames}", say=SAY, token_delay_s=0.1)
        reply = await clients.ask(key, [asked], leave_after=frames)
        (call,) = await _settled(world, clients.session_of[key])
        entry = await _served(world, call["id"])
        if reply.ended or entry["outcome"] == "finished":
            world.note("all was said before the client left")
            return
        assert (call["outcome"], call["delivered"]) == (Outcome.ABORTED, False), (frames, call)
        assert entry["outcome"] in ("cancelled", "aborted"), entry["outcome"]
        world.note("cancelled")

    await asyncio.gather(*(leave(frames) for frames in range(world.size)))
    assert world.notes["cancelled"] > world.size / 2
    await world.check()


async def repeats_itself(world: World) -> None:
    """An SDK's retries after a time-out, and duplicates at once: one of them is trained, the one that was continued."""
    clients = world.clients
    key = await clients.open_session()
    sdk = openai.AsyncOpenAI(base_url=clients.proxy.urls["agent"] + "/v1", api_key=key, timeout=0.4, max_retries=2)
    slow = turn(f"think {world.rng.random()}", say="slow", delay_s=world.rng.uniform(0.2, 0.5))
    messages: Any = [slow]
    try:
        await sdk.chat.completions.create(model="tiny", messages=messages)
    except openai.APITimeoutError:
        world.note("every try timed out")
    await sdk.close()
    await _settled(world, clients.session_of[key])
    key = await clients.open_session()
    same = turn(f"same {world.rng.random()}", say="same")
    twins = await asyncio.gather(*(clients.insist(key, [same]) for _ in range(2)))
    assert twins[0].call_id != twins[1].call_id
    chosen = twins[world.rng.randrange(2)]
    said = {"role": "assistant", "content": chosen.text}
    await clients.insist(key, [same, said, turn("go on")])
    calls = await _settled(world, clients.session_of[key])
    assert len(calls) == 3
    report = (await clients.admin(f"/read/sessions/{clients.session_of[key]}", method="GET"))["report"]
    sampled = sum(call["output_tokens"] for call in calls)
    assert report["trained_tokens"] < sampled, "both of two identical calls were trained"
    await world.check()


async def calls_in_parallel(world: World) -> None:
    """Branches of one conversation asked at once and continued in any order: every prompt is the engine's own."""
    clients, rng = world.clients, world.rng
    key = await clients.open_session()
    root: Messages = [turn("root", say="root")]
    reply = await clients.insist(key, root)
    branches = [[*root, {"role": "assistant", "content": reply.text}] for _ in range(4)]
    for depth in range(2):
        order = rng.sample(range(4), 4)

        async def grow(number: int, depth: int = depth) -> None:
            await asyncio.sleep(rng.random() / 50)
            branches[number].append(turn(f"branch {number} at {depth}", say=f"leaf {number} {depth}"))
            answer = await clients.insist(key, branches[number])
            branches[number].append({"role": "assistant", "content": answer.text})

        await asyncio.gather(*(grow(number) for number in order))
    session = clients.session_of[key]
    calls = await _settled(world, session)
    assert len(calls) == 9
    assert sum(call["parent_id"] is None for call in calls) == 1, "a branch lost its parent"
    served = [entry for entry in await world.journal() if entry["session"] == session]
    assert not [entry for entry in served if entry["extends"] is False]
    await world.check()


async def sends_too_much(world: World) -> None:
    """An endless chunked body: 413 while it is still being sent."""
    status, sent = await _dribble(world, piece=b"x" * 65_536, pause=0.0)
    assert status == 413, status
    assert sent < 40_000_000
    await _still_serves(world)


async def sends_too_slowly(world: World) -> None:
    """A byte at a time: 408 when the time to receive a request is over."""
    status, _ = await _dribble(world, piece=b"x", pause=0.1)
    assert status == 408, status
    await _still_serves(world)


async def _dribble(world: World, *, piece: bytes, pause: float) -> tuple[int, int]:
    """Sends pieces of a body for ever; the status of the answer, and how many bytes were sent before it."""
    key = await world.clients.open_session()
    port = int(world.proxy.urls["agent"].rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        f"authorization: Bearer {key}",
        "transfer-encoding: chunked",
    )
    writer.write("\r\n".join([*head, f"authorization: Bearer {key}", "", ""]).encode())
    answer = asyncio.create_task(reader.readline())
    sent = 0
    async with asyncio.timeout(20):
        while not answer.done():
            try:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
            except ConnectionError:
                break
            sent += len(piece)
            await asyncio.sleep(pause)
        line = await answer
    writer.transport.abort()
    await asyncio.sleep(0)
    return int(line.split()[1]), sent


async def _still_serves(world: World) -> None:
    key = await world.clients.open_session()
    assert (await world.clients.insist(key, [turn("still there?")])).ended
    await world.check()


async def sends_nonsense(world: World) -> None:
    """Broken JSON and UTF-8, lone surrogates, wrong types, mutilated bodies: 4xx and never 5xx."""
    key = await world.clients.open_session()
    good = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "häh?"}]}, ensure_ascii=False).encode()
    fixed = [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b'"x"', b'{"model": "tiny"}', b'{"model": NaN}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"model": "tiny", "messages": {"role": "user"}}',
        b'{"model": "tiny", "messages": [], "n": -1}',
        b'{"model": "tiny", "messages": [{"role": "user", "content": 7}]}',
        b'{"model": "tiny", "temperature": 1e999, "messages": [{"role": "user", "content": "x"}]}',
    ]  # fmt: skip
    bodies = [*fixed, *(_mutilated(good, world.rng) for _ in range(20))]
    url = world.proxy.urls["agent"] + "/v1/chat/completions"
    for body in bodies:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        async with world.http.post(url, data=body, headers=headers) as response:
            said = await response.read()
            assert response.status < 500, (body, response.status, said)
            assert body not in fixed or response.status >= 400 or b"ud800" in body, (body, said)
    await world.check()


def _mutilated(body: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(body))
    return rng.choice([body[:at], body[:at] + rng.randbytes(1) + body[at + 1 :], body[:at] + body[at + 1 :]])


async def sends_huge_tools(world: World) -> None:
    """A tool schema is stored once and a large one served; one over the limit and JSON of depth 10,000 are refused."""
    clients = world.clients
    key = await clients.open_session()
    text = world.rng.randbytes(10_000).hex()
    tools = [_tool(text)]
    before = await _bytes(world)
    messages: Messages = []
    for number in range(4):
        messages.append(turn(f"with tools {number}", say=str(number)))
        reply = await clients.insist(key, messages, tools=tools)
        messages.append({"role": "assistant", "content": reply.text})
    grown = await _bytes(world) - before
    assert grown < 2 * len(text), f"{grown} bytes for a schema of {len(text)}"
    deep = "[" * 10_000 + "]" * 10_000
    body = f'{{"model": "tiny", "messages": [{{"role": "user", "content": {deep}}}]}}'
    url = world.proxy.urls["agent"] + "/v1/chat/completions"
    async with world.http.post(url, data=body, headers={"authorization": f"Bearer {key}"}) as response:
        assert response.status == 400, await response.read()
    reply = await clients.ask(key, [turn("large")], tools=[_tool("d" * 300_000)])
    assert reply.ended, reply
    reply = await clients.ask(key, [turn("too large")], tools=[_tool("d" * 7_000_000)])
    assert reply.status in (0, 413), reply.status  # 0: cut off while it was still sending
    await world.check()


def _tool(description: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    return {"type": "function", "function": {"name": "bash", "description": description, "parameters": parameters}}


async def _bytes(world: World) -> int:
    """The bytes of all request parts in the log."""
    database = Database(world.url, writable=False)
    await database.start()
    try:
        async with database.read() as connection:
            return int(await connection.scalar(sa.text("SELECT coalesce(sum(length(data)), 0) FROM parts")))
    finally:
        await database.close()
