"""`rolltap run` that is stopped, or whose server is gone at its end: what the agent printed and made is still there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from ..forked_commands import forked_rolltap
from .service import Service, end, service, until

AGENT = "echo made > made.txt; echo printed before; while [ ! -e go ]; do sleep 0.1; done; echo printed after"


@pytest.mark.timeout(300)
async def test_a_run_whose_server_is_gone_at_its_end_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """9 CPU seconds: servers and commands are processes, and one server starts twice."""
    work = tmp_path / "work"
    work.mkdir()
    async with service(tmp_path, start=forked_rolltap) as server:
        monkeypatch.chdir(work)
        run = server.command("run", "command", "--", "sh", "-c", AGENT)

        async def made() -> bool:
            assert run.poll() is None, (tmp_path / "command.log").read_text()
            return (work / "made.txt").exists()

        await until(made, True)
        async with server.client() as client:
            session = (await client.get("/read/sessions"))["sessions"][0]["id"]
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """For tests that leave the server as it is."""
    async with service(tmp_path_factory.mktemp("service"), start=forked_rolltap) as server:
        yield server


@pytest.mark.timeout(300)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
async def test_a_run_that_is_interrupted_shows_what_the_agent_printed(
    sent: signal.Signals, running: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal sends Ctrl-C to the whole group; `kill` and service managers send SIGTERM to the command."""
    monkeypatch.chdir(tmp_path)
    log = running.folder / f"{sent.name}.log"
    run = running.command("run", "command", "--", "sh", "-c", f"echo begun; {AGENT}", log=log.name)

    async def made() -> bool:
        assert run.poll() is None, log.read_text()
        return (tmp_path / "made.txt").exists()

    await until(made, True)
    (os.killpg if sent is signal.SIGINT else os.kill)(run.pid, sent)
    status = await asyncio.to_thread(run.wait, 200)
    printed = log.read_text()
    assert status != 0
    assert "begun\n" in printed
    assert "is closed, its calls stay on record" in printed
    assert "Traceback" not in printed
