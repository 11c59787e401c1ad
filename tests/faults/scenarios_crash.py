"""The proxy dies, or what it stores into does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from redis.asyncio import Redis

from .clients import Reply, turn
from .world import World

POINTS = (
    "intent",
    "intent.written",
    "reply.part",
    "completion",
    "store.transaction",
    "store.committed",
    "completion.written",
    "reply.end",
    "ledger.transaction",
    "ledger.committed",
)
MORE_POINTS = {
    "sqlite": ("spool.appended", "spool.drained"),
    "postgres": (),
    "redis": ("ingest.appended", "ingest.written"),
}


async def killed_at_a_point(world: World) -> None:
    """Rollouts and a trainer at work; the proxy is killed at a named point, at a random pass, and started again."""
    points = POINTS + tuple(one for one in MORE_POINTS[world.store] if not one.startswith("spool"))
    for number in range(world.size):
        point = points[(number + world.rng.randrange(len(points))) % len(points)]
        world.proxy.crash_at(f"{point}:{world.rng.randint(1, 4)}")
        work = asyncio.create_task(_work(world))
        died = asyncio.create_task(world.proxy.died(30.0))
        await asyncio.wait([work, died], return_when=asyncio.FIRST_COMPLETED)
        world.note(point if died.done() else "after the work")
        died.cancel()
        await asyncio.wait([died])
        await world.proxy.kill()  # the pass did not come: death when all was done
        world.kills += 1
        await world.restart()
        await world.check()
        await work
        await world.check()


async def _work(world: World) -> None:
    clients = world.clients
    rollouts = await clients.open_group(2)
    await asyncio.gather(*(clients.roll_out(one) for one in rollouts))
    await clients.learn(1)


async def postgres_crashes(world: World) -> None:
    """Postgres is stopped at once under load: calls go on through the spool, and the ledger waits."""
    clients = world.clients
    keys = [await clients.open_session() for _ in range(4)]
    await asyncio.gather(*(clients.insist(key, [turn("first")]) for key in keys))
    going = [asyncio.create_task(_converse(world, key, 12)) for key in keys]
    rollouts = asyncio.create_task(_work(world))
    await asyncio.sleep(world.rng.uniform(0, 0.3))
    await world.postgres("stop")
    refused = [await task for task in going]
    await world.postgres("start")
    await world.check()
    await rollouts
    await world.check()
    assert not any(refused), "calls of known sessions were refused although there was a spool"


async def _converse(world: World, key: str, count: int) -> int:
    """How many of so many calls were refused."""
    refused = 0
    messages = [turn("begin")]
    for number in range(count):
        reply = await world.clients.ask(key, messages)
        refused += not reply.ended
        messages += [{"role": "assistant", "content": reply.text}, turn(f"go on {number}")]
        await asyncio.sleep(0.02)
    return refused


async def _ask_until_refused(world: World, key: str) -> Reply:
    """Makes calls whose text does not compress; the first one that is refused."""
    while True:
        reply = await world.clients.ask(key, [turn(world.rng.randbytes(20_000).hex())])
        if not reply.ended:
            return reply


async def spool_is_full(world: World) -> None:
    """With Postgres away for longer than the spool lasts: 503 with Retry-After, and the engine is not asked."""
    clients = world.clients
    key = await clients.open_session()
    await clients.insist(key, [turn("first")])
    await world.postgres("stop")
    reply = await _ask_until_refused(world, key)
    assert reply.status == 503, reply
    assert int(reply.headers["retry-after"]) >= 1
    asked = len(await world.journal())
    assert (await clients.ask(key, [turn(world.rng.randbytes(20_000).hex())])).status == 503
    assert len(await world.journal()) == asked, "the engine was asked although nothing could be recorded"
    await world.postgres("start")
    await world.check()
    assert (await clients.insist(key, [turn("again")])).ended


async def spool_survives_a_kill(world: World) -> None:
    """The proxy is killed while its calls are in the spool alone, or while it drains it."""
    clients = world.clients
    key = await clients.open_session()
    await clients.insist(key, [turn("first")])
    point = world.rng.choice(["spool.appended:3", "spool.appended:5", "spool.drained"])
    world.proxy.crash_at(point)
    await clients.insist(key, [turn("second")])
    await world.postgres("stop")
    for number in range(4):
        await clients.ask(key, [turn(f"away {number}")])
    await world.postgres("start")
    world.note(point if await world.proxy.died(3.0) else "after the work")
    await world.proxy.kill()
    await world.restart()
    await world.check()
    assert (await clients.insist(key, [turn("again")])).ended


async def postgres_is_slow(world: World) -> None:
    """Answers come late, then not within the stall time: slower calls, then the spool, and no loss."""
    relay, clients = world.relay, world.clients
    assert relay is not None
    key = await clients.open_session()
    await clients.insist(key, [turn("first")])
    for delay in (0.05, 0.3, 6.0)[: 1 + world.size]:
        relay.delay_s = delay * world.rng.uniform(0.5, 1)
        assert await _converse(world, key, 3) == 0
    world.back()
    relay.delay_s = 0.0
    await world.check()
    assert (await clients.insist(key, [turn("again")])).ended


async def redis_is_killed(world: World) -> None:
    """Redis dies or is emptied under load: facts go to Postgres from memory."""
    clients = world.clients
    keys = [await clients.open_session() for _ in range(3)]
    for _ in range(2):
        going = [asyncio.create_task(_converse(world, key, 6)) for key in keys]
        await asyncio.sleep(world.rng.uniform(0.02, 0.2))
        if world.rng.random() < 0.5:
            await world.redis("kill")
            refused = [await task for task in going]
            await world.redis("start")
        else:
            async with Redis.from_url(world.bench.redis.url) as vandal:
                await vandal.flushall()
            refused = [await task for task in going]
        assert not any(refused), f"{sum(refused)} calls were refused"
        await world.check()


async def disk_is_full(world: World) -> None:
    """The disk of the data folder fills up: the spool's room was taken before, then 503; it heals by itself."""
    clients = world.clients
    key = await clients.open_session()
    filler = world.proxy.folder / "filler"
    await clients.insist(key, [turn("first")])
    with filler.open("wb") as file:
        try:
            while True:
                file.write(b"\0" * 65_536)
                file.flush()
        except OSError:
            pass
    reply = await _ask_until_refused(world, key)
    assert reply.status == 503, reply
    world.back()
    filler.unlink()
    await world.check()
    assert (await clients.insist(key, [turn("again")])).ended
    await world.check()


async def second_writer(world: World) -> None:
    """A second proxy on the same SQLite file is refused, and readers from outside do no harm."""
    clients = world.clients
    command = [sys.executable, "-m", "rolltap", "serve", "--config", str(world.proxy.config)]
    command += ["--data", str(world.proxy.folder / "another")]  # a folder has one server, whatever its store
    command += [word for plane in ("agent", "trainer", "admin") for word in (f"--{plane}-port", "0")]
    second = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert second.returncode != 0
    assert "open for writing" in second.stderr.replace("\n", " ")
    database = f"file:{world.url.removeprefix('sqlite:///')}?mode=ro"
    connect = f"import sqlite3\nconnect = lambda: sqlite3.connect({database!r}, uri=True)\n"
    hammer = connect + "while True: connect().execute('SELECT count(*) FROM call_intents')"
    readers = [await asyncio.create_subprocess_exec(sys.executable, "-c", hammer) for _ in range(2)]
    keys = [await clients.open_session() for _ in range(4)]
    assert sum(await asyncio.gather(*(_converse(world, key, 10) for key in keys))) == 0
    for reader in readers:
        assert reader.returncode is None, "a reader was turned away"
        reader.kill()
        await reader.wait()
    await world.proxy.kill()
    sound = connect + "print(connect().execute('PRAGMA integrity_check').fetchone())"
    checked = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", sound], capture_output=True, text=True)
    assert checked.stdout.strip() == "('ok',)", checked
    await world.restart()
    await world.check()


async def power_is_cut(world: World) -> None:
    """By the kernel's own account (strace), every terminal frame leaves after an fsync of the last log write."""
    trace = world.proxy.folder / "trace"
    calls = "trace=pwrite64,fdatasync,fsync,write,writev,sendto,sendmsg"
    await world.proxy.kill()
    strace = ["strace", "-D", "-f", "-y", "-s", "100000", "-e", calls, "-o", str(trace)]
    assert await world.proxy.start(prefix=strace), world.proxy.tail()
    clients = world.clients
    key = await clients.open_session()
    for number in range(world.size):
        await clients.insist(key, [turn(f"call {number}", say="z" * world.rng.randrange(200))])
        await asyncio.sleep(0.1)  # the delivery of the call is written, so that only the next one's writes are between
    await world.proxy.stop()
    assert _ends_and_unsynced(trace) == (world.size, 0)
    await world.restart()
    await world.check()


def _ends_and_unsynced(trace: Path) -> tuple[int, int]:
    """How many terminal frames were sent, and how many while writes to SQLite's log were not on the disk."""
    written, synced, ends, unsynced = 0, 0, 0, 0
    syncing: dict[str, int] = {}
    for at, line in enumerate(trace.read_text(errors="replace").splitlines(), 1):
        thread, _, call = line.partition(" ")
        call = call.strip()
        if call.startswith("pwrite64(") and "-wal>" in call:
            written = at
        elif call.startswith(("fdatasync(", "fsync(")) and "-wal>" in call:
            syncing[thread] = at
            if not call.endswith("<unfinished ...>"):
                synced = syncing.pop(thread)
        elif "sync resumed>" in call:
            synced = syncing.pop(thread, synced)
        elif "[DONE]" in call:
            ends += 1
            unsynced += synced < written
    return ends, unsynced
