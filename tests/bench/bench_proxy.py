"""What recording costs a whole proxy: `python -m tests.bench.bench_proxy`. Writes reports/bench_proxy.json.

`rolltap serve` as a process, for each store and once with logging off (facts kept in memory, nothing encoded or
written); behind it the scripted engine with replies after 50 ms; before it 32 harnesses at once, each in sessions of
its own with conversations that grow to `TURNS` turns, streamed. Rounds are interleaved over the stores and medians
taken, so that other work on the machine hits all alike. Engine, proxy and load share the machine's cores: it is the
difference to logging off that counts. `direct` is the engine asked without a proxy.

`--profile STORE` runs one proxy under cProfile and prints its dearest functions.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import platform
import pstats
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rolltap import __version__
from rolltap.calllog.database import Database
from rolltap.calllog.memory import MemoryCallLog
from rolltap.calllog.schema import metadata
from rolltap.engine.scripted import Script, ScriptedEngine, Turn
from rolltap.engine.tiny import FOLDER

from ..conftest import PostgresServer, RedisServer, free_port

REPORT = Path("reports") / "bench_proxy.json"
TURNS = 5
GOALS = {"tax_percent": 10}
OFF = "logging off"
DIRECT = "direct"
KEYS = {"admin": "admin-key", "trainer": "trainer-key", "evaluator": "evaluator-key", "secret": "0123456789abcdef"}
TASK = "List the files in this folder, then say which of them is the largest and what it holds. " * 4
RESULT = "total 12\n-rw-r--r-- 1 user user 5120 notes.txt\n-rw-r--r-- 1 user user 120 todo.md\n" * 3


class Unlogged(MemoryCallLog):
    """Logging off: nothing is encoded or written. The ledger, which no call here touches, keeps its database."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.database = Database(f"sqlite:///{path}")

    async def start(self) -> None:
        await self.database.start(metadata)

    async def close(self) -> None:
        await self.database.close()


def serve_unlogged(config: Path) -> None:
    """`rolltap serve` with logging off."""
    from rolltap.proxy import app

    app.open_call_log = lambda url, **options: Unlogged(Path(url.removeprefix("sqlite:///")))
    serve(config)


def serve(config: Path) -> None:
    from rolltap.cli.serve import run
    from rolltap.settings import load_settings

    uvloop.run(run(load_settings(config), capture=False))


def serve_profiled(config: Path) -> None:
    """`rolltap serve` under cProfile; the figures are written beside `config` at its end."""
    profile = cProfile.Profile()
    try:
        profile.runcall(serve, config)
    finally:
        profile.dump_stats(config.with_suffix(".prof"))


def serve_engine(port: int, reply_s: float) -> None:
    turn = Turn(text="x " * 128, tokens_per_event=256, delay_s=reply_s)
    ScriptedEngine(Script(otherwise=turn), FOLDER, keep=0).run("127.0.0.1", port)


@contextmanager
def process(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child of this module (`serve_engine`, ...), stopped at the end."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "tests.bench.bench_proxy", "--child", *arguments]
        child = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@dataclass(frozen=True)
class Proxy:
    """A running proxy, and the keys of the sessions that harnesses call it with."""

    url: str
    pid: int
    admin: str

    async def key(self, http: aiohttp.ClientSession) -> str:
        headers = {"Authorization": f"Bearer {KEYS['admin']}"}
        async with http.post(f"{self.admin}/sessions", json={}, headers=headers) as answer:
            answer.raise_for_status()
            return (await answer.json())["key"]


def settings_file(folder: Path, engine: str, store: Mapping[str, Any]) -> tuple[Path, dict[str, int]]:
    ports = {f"{plane}_port": free_port() for plane in ("agent", "trainer", "admin")}
    sections: dict[str, dict[str, Any]] = {
        "listen": ports,
        "store": dict(store),
        "keys": KEYS,
        "engines.main": {"kind": "vllm", "url": engine},
        "policies.tiny": {"engine": "main", "model": "scripted", "tokenizer": str(FOLDER), "family": "qwen3"},
    }
    lines = [f"data = {json.dumps(str(folder / 'data'))}"]
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = folder / "rolltap.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, ports


@contextmanager
def running_proxy(folder: Path, engine: str, store: Mapping[str, Any], how: str = "serve") -> Iterator[Proxy]:
    folder.mkdir()
    config, ports = settings_file(folder, engine, store)
    with process(how, str(config), log=folder / "log") as child:
        agent, admin = (f"http://127.0.0.1:{ports[f'{plane}_port']}" for plane in ("agent", "admin"))
        yield Proxy(agent, child.pid, admin)


async def up(url: str, http: aiohttp.ClientSession) -> None:
    for _ in range(1200):
        try:
            async with http.get(url + "/"):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.1)
    raise AssertionError(f"nothing answers at {url}")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def harness(proxy: Proxy, http: aiohttp.ClientSession, key: str, left: Iterator[int], times: list[float]) -> None:
    """Conversations of `TURNS` turns, one after the other, in one session."""
    messages: list[dict[str, Any]] = []
    for index in left:
        if len(messages) >= 2 * TURNS:
            messages = []
        content = RESULT if messages else f"{index}: {TASK}"
        messages.append({"role": "user", "content": content})
        body = json.dumps({"model": "tiny", "stream": True, "messages": messages}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        start = time.perf_counter()
        async with http.post(f"{proxy.url}/v1/chat/completions", data=body, headers=headers) as answer:
            frames = await answer.read()
        times.append(time.perf_counter() - start)
        assert answer.status == 200, frames[:500]
        assert frames.endswith(b"data: [DONE]\n\n"), frames[-200:]
        messages.append({"role": "assistant", "content": said(frames)})


def said(frames: bytes) -> str:
    text = []
    for line in frames.split(b"\n\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text.append(choice["delta"].get("content") or "")
    return "".join(text)


async def direct(engine: str, http: aiohttp.ClientSession, left: Iterator[int], times: list[float]) -> None:
    prompt = list(range(300))
    body = json.dumps({"model": "scripted", "prompt": prompt, "stream": True, "return_token_ids": True}).encode()
    for _ in left:
        start = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        async with http.post(f"{engine}/v1/completions", data=body, headers=headers) as answer:
            await answer.read()
        assert answer.status == 200
        times.append(time.perf_counter() - start)


@dataclass(frozen=True)
class Round:
    calls_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_s_per_1000: float


async def one_round(target: Proxy | str, clients: int, calls: int) -> Round:
    """`target` is a proxy, or the engine's URL."""
    left = iter(range(calls))
    times: list[float] = []
    async with pooled(clients) as http:
        if isinstance(target, Proxy):
            keys = [await target.key(http) for _ in range(clients)]
            pid: int | None = target.pid
            work = [harness(target, http, key, left, times) for key in keys]
        else:
            pid = None
            work = [direct(target, http, left, times) for _ in range(clients)]
        before, start = cpu_seconds(pid) if pid else 0.0, time.perf_counter()
        await asyncio.gather(*work)
        seconds = time.perf_counter() - start
        cpu = cpu_seconds(pid) - before if pid else 0.0
    times.sort()
    return Round(calls / seconds, 1e3 * times[len(times) // 2], 1e3 * times[int(len(times) * 0.99)], 1e3 * cpu / calls)


@asynccontextmanager
async def pooled(clients: int) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as http:
        yield http


async def measure(arguments: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        postgres, second, redis = PostgresServer(), PostgresServer(), RedisServer()
        for server in (postgres, second, redis):
            server.start()
            stack.callback(server.remove)
        port = free_port()
        engine = f"http://127.0.0.1:{port}"
        stack.enter_context(process("engine", str(port), str(arguments.reply_ms / 1e3), log=folder / "engine.log"))
        stores: dict[str, tuple[dict[str, Any], str]] = {
            OFF: ({"url": f"sqlite:///{folder}/off.db"}, "unlogged"),
            "sqlite": ({"url": f"sqlite:///{folder}/log.db"}, "serve"),
            "postgres": ({"url": postgres.url()}, "serve"),
            "redis + postgres": ({"url": second.url(), "ingest": redis.url}, "serve"),
        }
        targets: dict[str, Proxy | str] = {DIRECT: engine}
        async with pooled(4) as http:
            await up(engine, http)
            for name, (store, how) in stores.items():
                if arguments.stores and name not in (OFF, *arguments.stores):
                    continue
                at = folder / name.replace(" ", "")
                proxy = stack.enter_context(running_proxy(at, engine, store, how))
                await up(proxy.url, http)
                targets[name] = proxy
        rounds: dict[str, list[Round]] = {name: [] for name in targets}
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("rounds", total=(arguments.rounds + 1) * len(targets))
            for number in range(arguments.rounds + 1):
                for name, target in targets.items():
                    figures = await one_round(target, arguments.clients, arguments.calls)
                    if number:  # the first warms up
                        rounds[name].append(figures)
                    progress.advance(task)
    return lines(rounds)


def lines(rounds: Mapping[str, list[Round]]) -> list[dict[str, Any]]:
    """Medians over the rounds; `added` to the engine's own times, `tax` against logging off in the same round."""
    found = []
    for name, some in rounds.items():
        taxes = [100 * (1 - one.calls_per_s / off.calls_per_s) for one, off in zip(some, rounds[OFF], strict=True)]
        both = list(zip(some, rounds[DIRECT], strict=True))
        found.append(
            {
                "store": name,
                "calls_per_s": statistics.median(one.calls_per_s for one in some),
                "p50_ms": statistics.median(one.p50_ms for one in some),
                "p99_ms": statistics.median(one.p99_ms for one in some),
                "added_p50_ms": statistics.median(one.p50_ms - bare.p50_ms for one, bare in both),
                "added_p99_ms": statistics.median(one.p99_ms - bare.p99_ms for one, bare in both),
                "cpu_s_per_1000": statistics.median(one.cpu_s_per_1000 for one in some),
                "tax_percent": statistics.median(taxes) if name != DIRECT else None,
            }
        )
    return found


async def profile(arguments: argparse.Namespace, console: Console) -> None:
    """One proxy on SQLite under cProfile."""
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder, port = Path(name), free_port()
        engine = f"http://127.0.0.1:{port}"
        store = {"url": f"sqlite:///{folder}/log.db"}
        with (
            process("engine", str(port), str(arguments.reply_ms / 1e3), log=folder / "engine.log"),
            running_proxy(folder / "proxy", engine, store, "profiled") as proxy,
        ):
            async with pooled(1) as http:
                await up(engine, http)
                await up(proxy.url, http)
            await one_round(proxy, arguments.clients, arguments.calls)
        stats = pstats.Stats(str(folder / "proxy" / "rolltap.prof"))
        stats.sort_stats("tottime").print_stats(35)
        stats.sort_stats("cumtime").print_stats("rolltap|proxy/", 45)
    console.print(f"{arguments.calls:,} calls")


def show(found: list[dict[str, Any]], console: Console, arguments: argparse.Namespace) -> None:
    title = f"the whole proxy: {arguments.clients} at once, replies after {arguments.reply_ms:g} ms"
    table = Table(*(name.replace("_", " ") for name in found[0]), title=title)
    for line in found:
        table.add_row(*("" if v is None else v if isinstance(v, str) else f"{v:,.2f}" for v in line.values()))
    console.print(table)


CHILDREN = {
    "serve": lambda config: serve(Path(config)),
    "unlogged": lambda config: serve_unlogged(Path(config)),
    "profiled": lambda config: serve_profiled(Path(config)),
    "engine": lambda port, reply_s: serve_engine(int(port), float(reply_s)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--calls", type=int, default=2000, help="of a round")
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one that does not")
    parser.add_argument("--reply-ms", type=float, default=50.0, help="the engine's time for a reply")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure; default the system's")
    parser.add_argument("--stores", nargs="*", help="only these, besides logging off")
    parser.add_argument("--profile", action="store_true", help="profile a proxy on SQLite instead")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        CHILDREN[arguments.child[0]](*arguments.child[1:])
        return
    console = Console()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the children and servers are stopped, too
    if arguments.profile:
        uvloop.run(profile(arguments, console))
        return
    started, load = time.time(), os.getloadavg()[0]
    found = uvloop.run(measure(arguments, console))
    show(found, console, arguments)
    report = {
        "rolltap": __version__,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "cores": os.cpu_count(),
        "load_average_before": load,
        "time": started,
        "seconds": time.time() - started,
        "goals": GOALS,
        "clients": arguments.clients,
        "calls": arguments.calls,
        "rounds": arguments.rounds,
        "reply_ms": arguments.reply_ms,
        "stores": found,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2), encoding="utf-8")
    console.print(f"report {REPORT}")


if __name__ == "__main__":
    main()
