"""`rolltap run` where the server is gone when the agent ends: what it printed and made is still there."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from .service import end, service, until

AGENT = "echo made > made.txt; echo printed before; while [ ! -e go ]; do sleep 0.1; done; echo printed after"


@pytest.mark.timeout(300)
async def test_a_run_whose_server_is_gone_at_its_end_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
