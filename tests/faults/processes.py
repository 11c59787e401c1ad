"""The processes of a fault run: proxies (forked, or started from nothing), the scripted engine, and helpers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from rolltap.engine.tiny import FOLDER

from ..conftest import free_port

HERE = Path(__file__).parent
UP_WITHIN_S = 180.0
STOPS_WITHIN_S = 20.0
KEYS = {"admin": "admin-key", "trainer": "trainer-key", "evaluator": "evaluator-key", "secret": "0123456789abcdef"}


class Process:
    """A process by its pid, its own child or not."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1

    async def ended(self, within: float) -> bool:
        """Whether it ended within so many seconds."""
        if self._fd < 0:
            return True
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._fd, gone.set)
        try:
            async with asyncio.timeout(within):
                await gone.wait()
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._fd)
        return True

    def send(self, number: signal.Signals) -> None:
        if self._fd >= 0:
            try:
                signal.pidfd_send_signal(self._fd, number)
            except ProcessLookupError:
                return

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def children_of(pid: int) -> Iterator[int]:
    """The processes that `pid` started, and those that they did."""
    by_parent: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                by_parent.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = list(by_parent.get(pid, ()))
    while waiting:
        child = waiting.pop()
        yield child
        waiting += by_parent.get(child, ())


def fake_clock(clock: Path) -> dict[str, str]:
    """Variables of a process whose clock is as many seconds ahead as the file says, which it reads once a second."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    assert found, "clocks can't be made to jump without libfaketime; scripts/servers.sh installs it"
    clock.write_text("+0")
    return {
        "LD_PRELOAD": str(found[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


class Forker:
    """See `forker.py`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "forker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        assert self._answers.readline() == "ready\n"

    def fork(self, config: Path, log: Path, points: Path) -> int:
        self._orders.write(json.dumps({"config": str(config), "log": str(log), "points": str(points)}) + "\n")
        self._orders.flush()
        return int(self._answers.readline())

    def close(self) -> None:
        self._orders.close()
        self._process.wait()
        self._answers.close()


class EngineProcess:
    """`rolltap engine --script turns.py`, started from nothing."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "rolltap", "engine", "--script", str(HERE / "turns.py"), "--port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Proxy:
    """One `rolltap serve` with fixed ports and a folder of its own, that can die and be started again.

    `more` are settings beside those that every one has, by section. One without a `forker` is started from nothing.
    """

    def __init__(
        self,
        folder: Path,
        forker: Forker | None,
        engine_url: str,
        store: Mapping[str, Any],
        more: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.config = folder / "rolltap.toml"
        self._points = folder / "points"
        os.mkfifo(self._points)
        self._forker = forker
        self._process: Process | None = None
        self._child: subprocess.Popen[bytes] | None = None
        ports = {f"{plane}_port": free_port() for plane in ("agent", "trainer", "admin")}
        self.urls = {plane: f"http://127.0.0.1:{ports[f'{plane}_port']}" for plane in ("agent", "trainer", "admin")}
        sections: dict[str, dict[str, Any]] = {
            "listen": ports,
            "limits": {"receipt_s": 3.0, "body_mb": 6, "calls_at_once": 64},
            "store": {"spool_mb": 4, **store},
            "keys": KEYS,
            "engines.main": {"kind": "vllm", "url": engine_url, "first_byte_s": 3.0, "idle_s": 3.0},
            "policies.tiny": {"engine": "main", "model": "scripted", "tokenizer": str(FOLDER), "family": "qwen3"},
        }
        for name, values in (more or {}).items():
            sections[name] = {**sections.get(name, {}), **values}
        lines = [f"data = {json.dumps(str(folder / 'data'))}"]
        for name, values in sections.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        self.config.write_text("\n".join(lines) + "\n")

    async def start(self, *, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None) -> bool:
        """Whether it is up; it is not where it died on its way. With a `prefix` or `env` it is started from nothing."""
        if prefix or env or self._forker is None:
            command = [*prefix, sys.executable, "-m", "rolltap", "serve", "--config", str(self.config)]
            self._child = await asyncio.to_thread(self._spawn, command, env or {})
            self._process = Process(self._child.pid)
        else:
            self._process = Process(self._forker.fork(self.config, self.log, self._points))
        async with aiohttp.ClientSession() as http:
            deadline = time.monotonic() + UP_WITHIN_S
            while time.monotonic() < deadline:
                try:
                    async with http.get(self.urls["agent"] + "/", timeout=aiohttp.ClientTimeout(total=5)):
                        return True
                except (aiohttp.ClientError, TimeoutError):
                    if await self._process.ended(0.02):
                        await self._end(signal.SIGKILL)
                        return False
        raise AssertionError(f"the proxy is not up after {UP_WITHIN_S:g} s: {self.tail()}")

    def _spawn(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})

    def crash_at(self, point: str) -> None:
        """It will die at this point (see `rolltap.crash.arm`). Only for a proxy that was forked."""
        pipe = os.open(self._points, os.O_WRONLY | os.O_NONBLOCK)  # fails where nobody reads
        os.write(pipe, f"{point}\n".encode())
        os.close(pipe)

    async def died(self, within: float) -> bool:
        return self._process is None or await self._process.ended(within)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self, within: float = STOPS_WITHIN_S) -> None:
        """In order, as an operator would."""
        await self._end(signal.SIGTERM, within)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send(number)

    async def _end(self, number: signal.Signals, within: float = STOPS_WITHIN_S) -> None:
        if self._process is None:
            return
        self._process.send(number)
        if not await self._process.ended(within):
            self._process.send(signal.SIGKILL)
            raise AssertionError(f"the proxy did not stop within {within:g} s: {self.tail()}")
        self._process.close()
        self._process = None
        if self._child is not None:
            await asyncio.to_thread(self._child.wait)
            self._child = None

    def tail(self, size: int = 2000) -> str:
        return self.log.read_text(errors="replace")[-size:] if self.log.exists() else ""
