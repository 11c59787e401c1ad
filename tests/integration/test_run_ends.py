"""`rolltap run` that is stopped, or whose server is gone at its end: what the agent printed and made is still there."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from .service import end, service, until

AGENT = "echo made > made.txt; echo printed before; while [ ! -e go ]; do sleep 0.1; done; echo printed after"


@pytest.mark.timeout(300)
async def test_a_run_whose_server_is_gone_at_its_end_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """9 CPU seconds: servers and commands are processes, and one server starts twice."""
    work = tmp_path / "work"
    work.mkdir()
    async with service(tmp_path) as server:
        monkeypatch.chdir(work)
        run = server.command("run", "command", "--", "sh", "-c", AGENT)

        async def made() -> bool:
            assert run.poll() is None, (tmp_path / "command.log").read_text()
            return (work / "made.txt").exists()

        await until(made, True)
        async with server.client() as client:
            session = (await client.get("/sessions"))["sessions"][0]["id"]
        await end(server.server, signal.SIGKILL)
        (work / "go").touch()
        status = await asyncio.to_thread(run.wait, 200)
        printed = (tmp_path / "command.log").read_text()
        assert status == 1
        assert "printed before\nprinted after\n" in printed
        assert "done after" in printed
        assert f"rolltap sessions close {session}" in printed
        assert "Traceback" not in printed
        assert "ssl:" not in printed
        assert (work / "made.txt").read_text() == "made\n"
        await server.kill()
        status, closed = await server.run("sessions", "close", session)
        assert (status, closed.splitlines()[0]) == (0, f"session {session} is closed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_a_run_that_is_interrupted_shows_what_the_agent_printed(
    sent: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends Ctrl-C to the whole group; `kill` and service managers send SIGTERM to the command."""
    work = tmp_path / "work"
    work.mkdir()
    async with service(tmp_path) as server:
        monkeypatch.chdir(work)
        run = server.command("run", "command", "--", "sh", "-c", f"echo begun; {AGENT}")

        async def made() -> bool:
            assert run.poll() is None, (tmp_path / "command.log").read_text()
            return (work / "made.txt").exists()

        await until(made, True)
        (os.killpg if sent is signal.SIGINT else os.kill)(run.pid, sent)
        status = await asyncio.to_thread(run.wait, 200)
        printed = (tmp_path / "command.log").read_text()
    assert status != 0
    assert "begun\n" in printed
    assert "is closed, its calls stay on record" in printed
    assert "Traceback" not in printed
