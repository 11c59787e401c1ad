"""`rolltap serve` on free ports, and commands in the same folder that find it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from rolltap.ids import new_id

from .service import end, rolltap

SERVE = ("serve", "--capture", "--agent-port", "0", "--trainer-port", "0", "--admin-port", "0")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def printed(folder: Path, *arguments: str) -> tuple[int, str]:
    log = folder / f"{new_id()}.log"
    env = {"COLUMNS": "400"}
    status = await asyncio.to_thread(rolltap(*arguments, env=env, log=log).wait, 60)
    return status, log.read_text()


@pytest.mark.acceptance
async def test_a_session_is_opened_where_the_server_of_this_folder_listens(here: Path) -> None:
    server = rolltap(*SERVE, env={"COLUMNS": "400"}, log=here / "serve.log")
    try:
        while "look at it" not in (here / "serve.log").read_text():
            assert server.poll() is None, (here / "serve.log").read_text()
            await asyncio.sleep(0.1)
        opened, second = await asyncio.gather(
            printed(here, "sessions", "open", "--policy", "openai"), printed(here, *SERVE)
        )
        assert opened[0] == 0, opened
        assert "export OPENAI_BASE_URL=http://127.0.0.1:" in opened[1]
        assert "/v1  # keep your own OPENAI_API_KEY" in opened[1]
        assert "ANTHROPIC" not in opened[1]
        status, text = await printed(here, "run", "command", "--policy", "openai", "--", "true")
        assert (status, "openai: calls are relayed to the vendor under your own key" in text) == (1, True), text
        assert second[0] == 1
        assert "a server with the data folder rolltap-data already runs on http://127.0.0.1:" in second[1]
        assert await end(server, signal.SIGKILL) == -signal.SIGKILL
        status, text = await printed(here, "sessions", "open", "--policy", "openai")
        assert (status, "was killed" in text) == (1, True), text
    finally:
        await end(server)
