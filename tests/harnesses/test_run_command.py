"""`rolltap run` with real harnesses: calls show as they end, Ctrl-C closes all, a killed proxy loses nothing.

Server, engine and command are processes of their own.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolltap.engine.scripted import Script, ScriptedReply
from rolltap.harnesses.agents.install import Installation

from ..integration.service import Service, service, until
from .conftest import CACHE
from .scenarios import PROMPT, TOOLS, script_of

SLOW_S = 8.0
"""What the engine waits before a reply: the proxy is killed meanwhile, and a busy machine is slow to show the call."""


@dataclass
class Started:
    """A `rolltap run` under way; what it prints goes to `log`."""

    service: Service
    process: Any
    log: Path

    async def calls(self) -> list[dict[str, Any]]:
        """Those of the only session."""
        session = await self.session()
        return session["calls"] if session else []

    async def session(self) -> dict[str, Any]:
        async with self.service.client() as client:
            rows = (await client.get("/read/sessions"))["sessions"]
            return await client.get(f"/read/sessions/{rows[0]['id']}") if rows else {}

    async def until_calls(self, ended: int, begun: int) -> None:
        """Waits until so many calls have ended and so many have begun."""

        async def counts() -> bool:
            calls = await self.calls()
            return len(calls) >= begun and sum(call["outcome"] != "open" for call in calls) >= ended

        await until(counts, True)

    async def printed(self, text: str) -> None:
        """Waits until `text` has been printed."""

        async def there() -> bool:
            return text in self.log.read_text()

        await until(there, True)

    async def over(self) -> str:
        """What was printed, when it has ended."""
        await asyncio.to_thread(self.process.wait, 120)
        return self.log.read_text()


@asynccontextmanager
async def started(name: str, script: Script, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Started]:
    """`rolltap run NAME -- PROMPT` in a folder of its own."""
    work = folder / "work"
    work.mkdir()
    path = folder / "script.json"
    path.write_bytes(msgspec.json.encode(script))
    async with service(folder, path) as server:
        monkeypatch.chdir(work)
        server.env["ROLLTAP_HARNESSES"] = str(CACHE)
        process = server.command("run", name, "--", f"{PROMPT} {folder.name}")
        try:
            yield Started(server, process, folder / "command.log")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def processes_with(text: str) -> list[str]:
    """The command lines of this machine's processes that hold `text`."""
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended
            continue
        if text in line:
            lines.append(line)
    return lines


@pytest.mark.harness
@pytest.mark.timeout(400)
async def test_calls_show_as_they_end_and_ctrl_c_closes_what_was_opened(
    release: Callable[[str], Installation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release("codex")
    tools = TOOLS["codex"]
    script = script_of(
        ScriptedReply(call=(tools.run("echo hi > out.txt"),)), ScriptedReply(say="word " * 2000, token_delay_s=0.05)
    )
    async with started("codex", script, tmp_path, monkeypatch) as run:
        await run.printed("call 1: ")
        await run.until_calls(ended=1, begun=2)
        assert "after" not in run.log.read_text()  # its last line
        assert (tmp_path / "work" / "out.txt").read_text() == "hi\n"
        assert processes_with(tmp_path.name)
        os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends it to the whole group
        printed = await run.over()
        await until(_outcomes(run), ["completed", "aborted"])
        session = await run.session()
    assert run.process.returncode not in (0, None)
    assert f"stopped; session {session['summary']['id']} is closed" in printed
    assert session["summary"]["closed_at"] is not None, session
    assert "call 2: " in printed
    assert "Traceback" not in printed
    assert not processes_with(tmp_path.name)


def _outcomes(run: Started) -> Callable[[], Any]:
    async def outcomes() -> list[str]:
        return [call["outcome"] for call in await run.calls()]

    return outcomes


@pytest.mark.harness
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["claude-code", "pi", "opencode"])  # those that try again for long enough
async def test_a_run_goes_on_behind_a_killed_proxy_and_its_log_matches(
    name: str, release: Callable[[str], Installation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release(name)
    tools = TOOLS[name]
    script = script_of(
        ScriptedReply(call=(tools.run("echo hi > out.txt"),)),
        ScriptedReply(say="Now I look.", call=(tools.run("cat out.txt"),), delay_s=SLOW_S),
        tools.end("It holds hi."),
    )
    async with started(name, script, tmp_path, monkeypatch) as run:
        await run.until_calls(ended=1, begun=2)
        await run.service.kill()
        printed = await run.over()
        session = await run.session()
    assert run.process.returncode == 0, printed
    assert session["log_check"]["verdict"] == "match", (session["log_check"], printed)
    outcomes = [call["outcome"] for call in session["calls"]]
    assert outcomes.count("completed") == 3, outcomes
    assert outcomes.count("aborted") == 1, outcomes
    assert (tmp_path / "work" / "out.txt").read_text() == "hi\n"
