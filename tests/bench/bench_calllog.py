"""The call log's speed and size: `python -m tests.bench.bench_calllog`. Writes reports/bench_calllog.json.

Calls a second and the time that a call waits for its two rows (intent and completion), for each store; the share of a
proxy's throughput that durability takes behind an engine of 50 ms; the size of a long session against its JSON; and a
restart on many recorded calls. Postgres and Redis are private servers on this machine's disk, with fsync.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.calllog.base import CallCompletion, CallIntent, CallLog, RequestParts
from rolltap.calllog.open import open_call_log
from rolltap.ids import new_id
from rolltap.types import Finish, Outcome, Session, VersionSpan

from ..conftest import PostgresServer, RedisServer

REPORT = Path("reports") / "bench_calllog.json"
VOCABULARY = 150_000
ENGINE_S = 0.05
GOALS = {
    "calls_per_s_sqlite": 5000,
    "tax_percent": 10,
    "times_smaller": 20,
    "restart_s": 3.0,
    "lookup_ms": 2.0,
}


def real_text() -> str:
    """The standard library's sources: text with the repetition that tool outputs have."""
    folder = Path(os.__file__).parent
    return "".join((folder / name).read_text(encoding="utf-8") for name in ("argparse.py", "typing.py", "inspect.py"))


def tokens_of(text: str) -> np.ndarray:
    """A word or sign a token; its id is a hash within a large vocabulary. About four characters a token."""
    words = re.findall(r"\s?\w{1,7}|\s?[^\w\s]|\s+", text)
    return np.array([zlib.crc32(word.encode()) % VOCABULARY for word in words], np.int32)


@dataclass(frozen=True)
class Sample:
    """What calls are made of: `new` prompt tokens, `out` sampled ones, and the text of both."""

    new: list[np.ndarray]
    out: list[np.ndarray]
    logprobs: list[np.ndarray]
    texts: list[bytes]

    @classmethod
    def draw(cls, rng: np.random.Generator, new: int, out: int, count: int = 64) -> Sample:
        text = real_text()
        tokens = tokens_of(text)
        starts = rng.integers(0, len(tokens) - new - out, count)
        return cls(
            [tokens[at : at + new] for at in starts],
            [tokens[at + new : at + new + out] for at in starts],
            [-rng.exponential(0.3, out).astype(np.float32) for _ in starts],
            [text[4 * at : 4 * (at + new)].encode() for at in starts],
        )

    def intent(self, session: str, index: int) -> CallIntent:
        index %= len(self.new)
        return CallIntent(
            id=new_id(),
            session_id=session,
            process="bench",
            created_at=time.time(),
            policy="policy",
            dialect="openai_chat",
            new_ids=self.new[index],
            request=RequestParts(b'{"model":"policy","temperature":1.0,"stream":true}', (self.texts[index],)),
            body_hash="0" * 64,
            sampling_asked={"temperature": 1.0},
            sampling_sent={"temperature": 1.0, "max_tokens": 4096, "model": "policy"},
            lineage=bytes(80),
        )

    def completion(self, call_id: str, index: int) -> CallCompletion:
        index %= len(self.out)
        out = self.out[index]
        return CallCompletion(
            call_id=call_id,
            finished_at=time.time(),
            outcome=Outcome.COMPLETED,
            finish=Finish.STOP,
            output_ids=out,
            logprobs=self.logprobs[index],
            versions=(VersionSpan(1, 0, len(out)),),
            message=self.texts[index][: 4 * len(out)],
            usage={"prompt": 1000, "output": len(out)},
            engine="main",
            logprobs_mode="processed",
        )


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[CallLog]:
    log = open_call_log(url, **options)
    await log.start()
    try:
        yield log
    finally:
        await log.close()


Stores = dict[str, Callable[[], Any]]


async def calls_per_second(log: CallLog, sample: Sample, clients: int, calls: int, engine_s: float) -> dict[str, float]:
    """Clients that write a call's rows one after the other, with the engine's time between them."""
    session = await a_session(log)
    left = iter(range(calls))
    waits: list[float] = []

    async def client() -> None:
        for index in left:
            start = time.perf_counter()
            intent = sample.intent(session, index)
            await log.append_intent(intent)
            waited = time.perf_counter() - start
            if engine_s:
                await asyncio.sleep(engine_s)
            start = time.perf_counter()
            await log.append_completion(sample.completion(intent.id, index))
            waits.append(waited + time.perf_counter() - start)

    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    waits.sort()
    return {
        "clients": clients,
        "calls_per_s": calls / seconds,
        "p50_ms": 1e3 * waits[len(waits) // 2],
        "p99_ms": 1e3 * waits[int(len(waits) * 0.99)],
        "cpu_us_per_call": 1e6 * cpu / calls,
    }


async def a_session(log: CallLog) -> str:
    session = Session(new_id(), "policy", new_id(), time.time(), time.time() + 86_400)
    await log.open_session(session)
    return session.id


async def speed(stores: Stores, sample: Sample, scale: float) -> list[dict[str, Any]]:
    """Each store alone, at several numbers of clients."""
    lines = []
    for name, store in stores.items():
        for clients in (1, 32, 64, 128):
            async with store() as log:
                calls = int(scale * (500 if clients == 1 else 10_000))
                lines.append({"store": name, **await calls_per_second(log, sample, clients, calls, 0.0)})
    return lines


async def tax(stores: Stores, sample: Sample, scale: float) -> list[dict[str, Any]]:
    """The share of throughput that each store takes at 32 clients behind an engine of 50 ms."""
    calls = int(scale * 3000)

    async def rate(store: Callable[[], Any]) -> dict[str, float]:
        async with store() as log:
            return await calls_per_second(log, sample, 32, calls, ENGINE_S)

    free = (await rate(lambda: opened("memory:")))["calls_per_s"]
    lines = []
    for name, store in stores.items():
        figures = await rate(store)
        lines.append({"store": name, **figures, "tax_percent": 100 * (1 - figures["calls_per_s"] / free)})
    return lines


async def size(folder: Path, seed: int) -> dict[str, Any]:
    """A session of 50 turns that grows to 32k tokens, with tools and a system text, in SQLite and as JSON.

    The JSON is what a gateway would log: each request as the harness sent it (its whole history), and each reply with
    its prompt ids, output ids and log-probs.
    """
    rng = np.random.default_rng(seed)
    text = real_text()
    turns, tools = (
        50,
        [{"type": "function", "function": {"name": f"tool_{n}", "doc": text[n * 900 :][:900]}} for n in range(12)],
    )
    path = folder / "size.db"
    log = open_call_log(f"sqlite:///{path}")
    await log.start()
    session = await a_session(log)
    packed_tools, head = json.dumps(tools).encode(), b'{"model":"policy","temperature":1.0,"stream":true}'
    messages: list[dict[str, Any]] = []
    parent, context, items, raw, at = None, np.empty(0, np.int32), 0, 0, 20_000
    for turn in range(turns):
        asked, answered = (9000, 700) if turn == 0 else (1750 + int(rng.integers(500)), 500 + int(rng.integers(300)))
        new_text, reply = text[at : at + asked], text[at + asked : at + asked + answered]
        at += asked + answered
        new, out = tokens_of(new_text), tokens_of(reply)
        logprobs = -rng.exponential(0.3, len(out)).astype(np.float32)
        messages.append({"role": "tool" if turn else "user", "content": new_text})
        intent = CallIntent(
            new_id(), session, "bench", time.time(), "policy", "openai_chat", new,
            RequestParts(head, tuple(json.dumps(m).encode() for m in messages[items:]), items, {"tools": packed_tools}),
            parent_id=parent, shared=len(context), lineage=rng.bytes(80),
        )  # fmt: skip
        await log.append_intent(intent)
        items = len(messages)
        prompt = np.concatenate([context, new])
        message = {"role": "assistant", "content": reply}
        await log.append_completion(
            CallCompletion(
                intent.id, time.time(), Outcome.COMPLETED, Finish.STOP, out, logprobs, (VersionSpan(1, 0, len(out)),),
                message=json.dumps(message).encode(),
            )
        )  # fmt: skip
        exchange = {
            "request": {"model": "policy", "messages": messages, "tools": tools},
            "response": message,
            "prompt_ids": prompt.tolist(),
            "output_ids": out.tolist(),
            "logprobs": [round(float(value), 6) for value in logprobs],
        }
        raw += len(json.dumps(exchange))
        messages.append(message)
        parent, context = intent.id, np.concatenate([prompt, out])
    rows = await log.rows(session)
    assert rows[-1].prompt_ids.tolist() + rows[-1].call().output_ids.tolist() == context.tolist()
    await log.close()
    with sqlite3.connect(path) as database:
        database.execute("VACUUM")
    database.close()
    stored = path.stat().st_size
    empty = 4096 * 16
    return {
        "turns": turns,
        "tokens": len(context),
        "json_bytes": raw,
        "stored_bytes": stored,
        "times_smaller": raw / stored,
        "stored_bytes_without_empty_pages": stored - empty,
    }


FILL = """
import asyncio, os, signal, sys
import numpy as np
from tests.bench.bench_calllog import fill
asyncio.run(fill(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
os.kill(os.getpid(), signal.SIGKILL)
"""


async def fill(url: str, calls: int, seed: int) -> None:
    """Records many small calls in sessions of 100, and leaves 50 of them open."""
    sample = Sample.draw(np.random.default_rng(seed), 96, 32)
    log = open_call_log(url)
    await log.start()
    sessions: list[str] = []
    for start in range(0, calls, 1000):
        sessions = [await a_session(log) for _ in range(10)]
        intents = [sample.intent(sessions[index % 10], index) for index in range(min(1000, calls - start))]
        await asyncio.gather(*map(log.append_intent, intents))
        ended = [sample.completion(intent.id, index) for index, intent in enumerate(intents)]
        await asyncio.gather(*map(log.append_completion, ended))
    for index in range(50):
        await log.append_intent(sample.intent(sessions[0], index))


async def restart(url: str, calls: int, seed: int, console: Console) -> dict[str, Any]:
    """Records calls in a process that is killed; then: open, close its open calls, look a session up by its key."""
    with console.status(f"recording {calls:,} calls"):
        started = time.perf_counter()
        filler = [sys.executable, "-c", FILL, url, str(calls), str(seed)]
        done = await asyncio.to_thread(subprocess.run, filler, check=False)
        assert done.returncode == -signal.SIGKILL, f"the filling process ended with {done.returncode}"
        filled = time.perf_counter() - started
    start = time.perf_counter()
    log = open_call_log(url)
    await log.start()
    aborted = await log.abort_orphans([], at=time.time())
    first = (await log.sessions(limit=1))[0]
    await log.session_by_key(first.key_hash)
    ready = time.perf_counter() - start
    keys = [session.key_hash async for session in log.all_sessions()]
    random.Random(seed).shuffle(keys)
    times = []
    for key in keys[:2000]:
        start = time.perf_counter()
        await log.session_by_key(key)
        times.append(time.perf_counter() - start)
    start = time.perf_counter()
    rows = await log.rows(first.id)
    loaded = time.perf_counter() - start
    await log.close()
    times.sort()
    return {
        "calls": calls,
        "sessions": len(keys),
        "recorded_calls_per_s": calls / filled,
        "restart_s": ready,
        "aborted": aborted,
        "lookup_p50_ms": 1e3 * times[len(times) // 2],
        "lookup_p99_ms": 1e3 * times[int(len(times) * 0.99)],
        "load_session_ms": 1e3 * loaded,
        "session_calls": len(rows),
    }


async def run(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    sample = Sample.draw(np.random.default_rng(arguments.seed), 700, 300)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        figures: dict[str, Any] = {"size": await size(folder, arguments.seed)}
        if arguments.restart:
            figures["restart"] = await restart(
                f"sqlite:///{folder}/many.db", arguments.restart, arguments.seed, console
            )
        if arguments.scale:
            postgres, redis = PostgresServer(), RedisServer()
            postgres.start()
            redis.start()
            numbers = iter(range(1000))
            stores: Stores = {
                "memory": lambda: opened("memory:"),
                "sqlite": lambda: opened(f"sqlite:///{folder}/{next(numbers)}.db"),
                "postgres": lambda: opened(postgres.url()),
                "redis + postgres": lambda: opened(postgres.url(), ingest=redis.url),
            }
            try:
                figures["speed"] = await speed(stores, sample, arguments.scale)
                figures["tax"] = await tax(stores, sample, arguments.scale)
            finally:
                redis.remove()
                postgres.remove()
    return figures


def show(figures: dict[str, Any], console: Console) -> None:
    for title in ("speed", "tax"):
        lines = figures.get(title, [])
        table = Table(*(lines[0] if lines else ()), title=f"call log: {title}")
        for line in lines:
            table.add_row(*(value if isinstance(value, str) else f"{value:,.2f}" for value in line.values()))
        if lines:
            console.print(table)
    for title in ("size", "restart"):
        table = Table("what", title, title=f"call log: {title}")
        for name, value in figures.get(title, {}).items():
            table.add_row(name.replace("_", " "), f"{value:,.2f}")
        if title in figures:
            console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the speed runs; 0 leaves them out")
    parser.add_argument("--restart", type=int, default=1_000_000, help="calls recorded before the restart; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default the system's")
    arguments = parser.parse_args()
    console = Console()
    started, load = time.time(), os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the servers are stopped, too
    figures = uvloop.run(run(arguments, console))
    show(figures, console)
    report = {
        "rolltap": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "load_average_before": load,
        "seed": arguments.seed,
        "time": started,
        "seconds": time.time() - started,
        "goals": GOALS,
        **figures,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2), encoding="utf-8")
    console.print(f"report {REPORT}")


if __name__ == "__main__":
    main()
