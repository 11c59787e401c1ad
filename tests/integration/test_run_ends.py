"""`rolltap run` that is stopped, or whose server is gone at its end: what the agent printed and made is still there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from rolltap.engine.tiny import FOLDER

from ..forked_commands import forked_rolltap
from .service import POLICY, SCRIPT, Service, end, service, until

AGENT = "echo made > made.txt; echo printed before; while [ ! -e go ]; do sleep 0.1; done; echo printed after"


@pytest.mark.acceptance
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


ASK = """
import json, os, sys, urllib.request

body = {"model": sys.argv[1], "messages": [{"role": "user", "content": "Hello!"}]}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
try:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
except OSError as error:
    print("an agent that hides it:", error)
"""


@pytest.mark.timeout(120)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("code", "argument", "status"), [("pass", "", 1), (ASK, "another-model", 1), (ASK, POLICY, 0)])
async def test_a_run_that_no_model_answered_is_no_success(
    code: str, argument: str, status: int, running: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent ends with 0."""
    monkeypatch.chdir(tmp_path)
    ended, printed = await running.run("run", "command", "--", sys.executable, "-c", code, argument)
    assert (ended, "no model answered" in printed) == (status, status == 1), printed


@dataclass(frozen=True)
class Long:
    """A command that goes on until it is stopped: what it prints before that, and then. Its status is 130; also 0, if
    to be stopped is its `usual` end."""

    words: tuple[str, ...]
    begun: str
    told: str
    usual: bool = False


LONG = {
    "engine": Long(("engine", "--script", "SCRIPT", "--port", "0"), "http://", "stopped"),
    "serve": Long(
        ("serve", "--data", "other", "--engine", "http://127.0.0.1:9", "--tokenizer", str(FOLDER), "--policy", "p")
        + ("--agent-port", "0", "--trainer-port", "0", "--admin-port", "0"),
        "look at it",
        "stopped",
        usual=True,
    ),
    "view": Long(("view", "STORE"), "works once", "stopped", usual=True),
    "node": Long(("node",), "agents at once", "stopped; rollouts that had not ended go to another node", usual=True),
    "run": Long(
        ("run", "TASKS", "--policy", POLICY, "--nodes"), "submission", "nodes go on; the same command with --id"
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", LONG)
async def test_what_goes_on_until_it_is_stopped_says_so_and_leaves_nothing(
    name: str, sent: signal.Signals, running: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task = {"id": "t", "instruction": "wait", "harness": "command", "argv": ["sleep", "60"]}
    (tmp_path / "tasks.jsonl").write_text(json.dumps({**task, "evaluator": {"kind": "session_completed"}}))
    (tmp_path / "script.toml").write_text(SCRIPT)
    database = next((running.folder / "data").glob("*.db"))
    places = {"TASKS": "tasks.jsonl", "SCRIPT": "script.toml", "STORE": str(database)}
    long, log = LONG[name], running.folder / f"{name}-{sent.name}.log"
    command = running.command(*(places.get(word, word) for word in long.words), log=log.name)

    async def begun() -> bool:
        assert command.poll() is None, log.read_text()
        return long.begun in log.read_text()

    await until(begun, True)
    (os.killpg if sent is signal.SIGINT else os.kill)(command.pid, sent)
    status = await asyncio.to_thread(command.wait, 60)
    printed = log.read_text()
    assert status in ((0, 130) if long.usual else (130,)), printed
    assert "Traceback" not in printed
    assert long.told in printed.splitlines()[-1], printed
    assert command.pid not in process_sessions()


def process_sessions() -> set[int]:
    """The sessions of all processes on this machine."""
    found = set[int]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            found.add(os.getsid(int(process.name)))
    return found
