"""Starts what `bench_proxy` measures: the canned engine, the floor, and `rolltap serve` on each store.

The proxy that is measured runs on the first core; the engine, the load and the stores' servers on the last.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from rolltap.calllog.database import Database
from rolltap.calllog.schema import metadata

from ..conftest import free_port
from ..memory_log import MemoryCallLog

KEYS = {"admin": "admin-key", "trainer": "trainer-key", "evaluator": "evaluator-key", "secret": "0123456789abcdef"}
SESSIONS = 400
PROXY_CORES, OTHER_CORES = {min(os.sched_getaffinity(0))}, {max(os.sched_getaffinity(0))}
START_S = 120.0


class Unlogged(MemoryCallLog):
    """Logging off: nothing is encoded or written. The ledger, which no call here touches, keeps its database."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.database = Database(f"sqlite:///{path}")

    async def start(self) -> None:
        await self.database.start(metadata)

    async def close(self) -> None:
        await self.database.close()

    async def settled(self) -> None:
        """All facts can be read as soon as they are appended."""


def serve(config: Path, workers: int = 1) -> None:
    from rolltap.cli.serve import serve_all
    from rolltap.settings import load_settings

    serve_all(load_settings(config), str(workers), capture=False)


def serve_unlogged(config: Path) -> None:
    """`rolltap serve` with logging off."""
    from rolltap.proxy import app

    app.open_call_log = lambda url, **options: Unlogged(Path(url.removeprefix("sqlite:///")))
    serve(config)


def serve_profiled(config: Path) -> None:
    """`rolltap serve` under cProfile; the figures are written beside `config` at its end."""
    import cProfile

    profile = cProfile.Profile(time.thread_time)  # the CPU of the main thread, whatever else the machine does
    try:
        profile.runcall(serve, config)
    finally:
        profile.dump_stats(config.with_suffix(".prof"))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants, those that have ended too."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    own = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)


@dataclass(frozen=True)
class Target:
    """A running server that answers chat calls, and the keys of the sessions it knows."""

    name: str
    url: str
    pid: int
    admin: str = ""
    keys: list[str] = field(default_factory=lambda: [f"key-{index}" for index in range(SESSIONS)])

    def cpu_s(self) -> float:
        return cpu_seconds(self.pid)

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Launcher:
    """Starts child processes that end with `stack`; each child logs into a folder of its own."""

    stack: ExitStack
    folder: Path
    tokenizer: Path
    family: str

    async def engine(self) -> Target:
        vocabulary = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        token, end = vocabulary.encode("~", add_special_tokens=False).ids[0], vocabulary.token_to_id("<|im_end|>")
        port = free_port()
        command = ("tests.bench.canned_engine", "--port", str(port), "--token", str(token), "--end", str(end))
        return await self._start("direct", f"http://127.0.0.1:{port}", OTHER_CORES, command)

    async def forwarder(self, name: str, engine: str, *, durable: bool) -> Target:
        port = free_port()
        record = ("--record", str(self.folder / f"{name}.db")) if durable else ()
        command = ("tests.bench.floor", "--port", str(port), "--engine", engine, *record)
        return await self._start(name, f"http://127.0.0.1:{port}", PROXY_CORES, command)

    async def rolltap(
        self,
        name: str,
        engine: str,
        store: Mapping[str, Any],
        mode: str = "serve",
        cores: set[int] = PROXY_CORES,
        checkout: Path | None = None,
        sessions: int = SESSIONS,
    ) -> Target:
        """`rolltap serve`, of another `checkout` of the repository if one is given."""
        folder = self.folder / name.replace(" ", "")
        folder.mkdir()
        config, ports = self._settings(folder, engine, store)
        agent, admin = (f"http://127.0.0.1:{ports[f'{plane}_port']}" for plane in ("agent", "admin"))
        target = await self._start(name, agent, cores, ("tests.bench.proxies", mode, str(config)), checkout)
        return Target(name, agent, target.pid, admin, await open_sessions(admin, sessions))

    async def _start(
        self, name: str, url: str, affinity: set[int], command: tuple[str, ...], checkout: Path | None = None
    ) -> Target:
        log = self.folder / f"{name}.log"
        child = self.stack.enter_context(running(command, affinity, log, checkout))
        async with aiohttp.ClientSession() as http, asyncio.timeout(START_S):
            while not await answers(http, url):
                if child.poll() is not None:
                    raise RuntimeError(
                        f"{name} ended with {child.returncode}: {log.read_text(encoding='utf-8')[-2000:]}"
                    )
                await asyncio.sleep(0.1)
        return Target(name, url, child.pid)

    def _settings(self, folder: Path, engine: str, store: Mapping[str, Any]) -> tuple[Path, dict[str, int]]:
        ports = {f"{plane}_port": free_port() for plane in ("agent", "trainer", "admin")}
        policy = {"engine": "main", "model": "canned", "tokenizer": str(self.tokenizer), "family": self.family}
        sections: dict[str, Mapping[str, Any]] = {
            "listen": ports,
            "store": store,
            "keys": KEYS,
            "engines.main": {"kind": "vllm", "url": engine},
            "policies.canned": policy,
        }
        lines = [f"data = {json.dumps(str(folder / 'data'))}"]
        for name, values in sections.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        path = folder / "rolltap.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path, ports


@contextmanager
def running(
    command: tuple[str, ...], affinity: set[int], log: Path, checkout: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m COMMAND` on these cores, interrupted at the end; with the modules of `checkout`, if one is given."""
    pinned = ["taskset", "-c", ",".join(map(str, sorted(affinity))), sys.executable, "-m", *command]
    environment = os.environ | ({"PYTHONPATH": f"{checkout / 'src'}:{checkout}"} if checkout is not None else {})
    with log.open("wb") as output:
        child = subprocess.Popen(pinned, stdout=output, stderr=output, cwd=checkout, env=environment)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


async def answers(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url + "/"):
            return True
    except aiohttp.ClientError:
        return False


async def open_sessions(admin: str, count: int) -> list[str]:
    """The keys of new sessions."""
    return [session["key"] for session in [await admin_post(admin, "/sessions") for _ in range(count)]]


async def admin_post(admin: str, path: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEYS['admin']}"}
    async with aiohttp.ClientSession() as http, http.post(admin + path, json={}, headers=headers) as reply:
        reply.raise_for_status()
        return await reply.json()


MODES = {
    "serve": serve,
    "unlogged": serve_unlogged,
    "profiled": serve_profiled,
    "two_workers": partial(serve, workers=2),
    "four_workers": partial(serve, workers=4),
}

if __name__ == "__main__":
    MODES[sys.argv[1]](Path(sys.argv[2]))
