"""`rolltap engine --script` and `rolltap serve` as real processes, for tests that kill things."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from rolltap.engine.tiny import FOLDER
from rolltap.harnesses.client import AdminClient

from ..conftest import free_port
from ..fork_server import ForkedProcess

POLICY = "tiny"
SCRIPT = 'otherwise = { say = "Hello." }\n'
ASK = (
    'import json, os, urllib.request as u; b = os.environ["OPENAI_BASE_URL"]; k = os.environ["OPENAI_API_KEY"]; '
    'r = u.Request(b + "/chat/completions", json.dumps({"model": os.environ["OPENAI_MODEL"], '
    '"messages": [{"role": "user", "content": "hi"}]}).encode(), '
    '{"Authorization": "Bearer " + k, "Content-Type": "application/json"}); print(u.urlopen(r).status)'
)
"""An agent in one line: it asks once."""


def rolltap(*arguments: str, env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """The command in a process group of its own; what it prints goes to `log`."""
    command = [str(Path(sys.executable).parent / "rolltap"), *arguments]
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **env}, start_new_session=True
        )


Process = subprocess.Popen[bytes] | ForkedProcess


async def end(process: Process, number: int = signal.SIGTERM) -> int:
    """Signals the process, if it still runs, and waits for it."""
    if process.poll() is None:
        process.send_signal(number)
    return await asyncio.to_thread(process.wait, 30)


async def until(found: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Asks again until `found` gives what is wanted; the test's own time-out ends it."""
    while await found() != wanted:  # noqa: ASYNC110  the event is another process's
        await asyncio.sleep(0.1)


@dataclass
class Service:
    """A server and its engine, each in a process of its own."""

    folder: Path
    admin_url: str
    trainer_url: str
    env: dict[str, str]
    config: Path
    start: Callable[..., Process]
    server: Process

    def command(self, *arguments: str, log: str = "command.log") -> Process:
        """A `rolltap` command that finds this server."""
        return self.start(*arguments, env=self.env, log=self.folder / log)

    async def run(self, *arguments: str) -> tuple[int, str]:
        """A `rolltap` command brought to its end: its exit status and what it printed."""
        log = f"run-{len(list(self.folder.iterdir()))}.log"
        status = await asyncio.to_thread(self.command(*arguments, log=log).wait, 250)
        return status, (self.folder / log).read_text()

    async def kill(self) -> None:
        """SIGKILL for the server; then it starts again at the same addresses."""
        await end(self.server, signal.SIGKILL)
        self.server = _serve(self.start, self.config)
        await _until_up(self.admin_url, self.server)

    def client(self) -> AdminClient:
        return AdminClient(self.admin_url, self.env["ROLLTAP_ADMIN_KEY"])


@asynccontextmanager
async def service(
    folder: Path, script: Path | None = None, settings: str = "", start: Callable[..., Process] = rolltap
) -> AsyncIterator[Service]:
    """A server on SQLite in `folder`, with an engine that follows `script` or always says hello.

    `settings` are further sections of its settings file. `start`: as `rolltap`; it starts all commands.
    """
    engine_port, agent_port, admin_port, trainer_port = (free_port() for _ in range(4))
    if script is None:
        script = folder / "script.toml"
        script.write_text(SCRIPT)
    config = folder / "rolltap.toml"
    config.write_text(
        f'data = "{folder / "data"}"\n[listen]\nagent_port = {agent_port}\n'
        f"trainer_port = {trainer_port}\nadmin_port = {admin_port}\n"
        f'[engines.main]\nurl = "http://127.0.0.1:{engine_port}"\n'
        f'[policies.{POLICY}]\nengine = "main"\nmodel = "scripted"\ntokenizer = "{FOLDER}"\nfamily = "qwen3"\n'
        + settings
    )
    engine = start("engine", "--script", str(script), "--port", str(engine_port), env={}, log=folder / "engine.log")
    url = f"http://127.0.0.1:{admin_port}"
    trainer_url, env = f"http://127.0.0.1:{trainer_port}", {"ROLLTAP_ADMIN_URL": url}
    running = Service(folder, url, trainer_url, env, config, start, _serve(start, config))
    try:
        await _until_up(f"http://127.0.0.1:{engine_port}", engine)
        await _until_up(url, running.server)
        keys = tomllib.loads((folder / "data" / "keys.toml").read_text())
        running.env |= {f"ROLLTAP_{role.upper()}_KEY": keys[role] for role in ("admin", "trainer", "runner")}
        running.env["COLUMNS"] = "160"
        yield running
    finally:
        await asyncio.gather(end(running.server), end(engine))


def _serve(start: Callable[..., Process], config: Path) -> Process:
    return start("serve", "--config", str(config), env={}, log=config.with_name("serve.log"))


async def _until_up(url: str, process: Process) -> None:
    async with aiohttp.ClientSession() as http:
        while process.poll() is None:
            try:
                async with http.get(url):
                    return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)
    raise AssertionError(f"what was to serve {url} ended with {process.returncode}")
