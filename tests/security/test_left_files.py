"""Files that grow when they are decoded, or take long to read: the runner goes on, and they count against the agent.

Each case is a whole rollout whose agent leaves one such file; nothing of it is read in the runner's process. About
three CPU seconds each: the file is decoded up to the reader's limit.
"""

from __future__ import annotations

import asyncio
import resource
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import Unreadable
from rolltap.harnesses.base import Command, Evidence, Job, Launch, Verdict
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.left_files import read_untrusted
from rolltap.harnesses.runner import lifecycle
from rolltap.harnesses.runner.attempts import run_groups
from rolltap.harnesses.runner.lifecycle import Assignment, RolloutRunner
from rolltap.harnesses.runner.tampering_scan import acts_since
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import Task

from ..unit.harnesses.stub import Stub, running, tool_call

GROWING = b'{"message":{"content":[' + b"{}," * 8_000_000 + b"{}]}}\n"
"""24 MB of text, over 512 MB in memory."""
LATE_S = 1.5
GROWN_KB = 300 << 10


def grown_database(path: Path) -> None:
    """A message that the query repeats for each of its parts."""
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(
            "CREATE TABLE session (id text, parent_id text); INSERT INTO session VALUES ('s', NULL);"
            "CREATE TABLE message (id text, session_id text, time_created integer, data text);"
            "CREATE TABLE part (id text, message_id text, data text);"
        )
        database.execute("INSERT INTO message VALUES ('m', 's', 1, ?)", ("x" * 8_000_000,))
        database.executemany("INSERT INTO part VALUES (?, 'm', '{}')", [(str(number),) for number in range(1000)])


def written(name: str, data: bytes = GROWING) -> Callable[[Path], None]:
    def write(home: Path) -> None:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(data)

    return write


LOGS: dict[str, Callable[[Path], None]] = {
    "codex": written(".codex/sessions/2026/01/01/rollout-1.jsonl"),
    "command": written("trajectory.json"),
    "opencode": lambda home: grown_database(home / ".local/share/opencode/opencode.db"),
}


class Leaves:
    """A harness whose agent leaves files in its HOME and working copy."""

    package, dialect, quirks = None, "openai_chat", ()

    def __init__(self, name: str, source: Path) -> None:
        self.name, self.source = name, source

    def launch(self, job: Job) -> Launch:
        return Command(("/bin/sh", "-c", f"cp -r {self.source}/. . && cp -r {self.source}/. $HOME"))


class Pulse:
    """How late the event loop was at worst, in seconds."""

    def __init__(self) -> None:
        self.late = 0.0

    async def beat(self) -> None:
        while True:
            at = time.monotonic()
            await asyncio.sleep(0.02)
            self.late = max(self.late, time.monotonic() - at)


@pytest.fixture
async def server() -> AsyncIterator[Stub]:
    async with running(Stub(lambda messages: tool_call("true"))) as stub:
        yield stub


async def rolled_out(server: Stub, name: str, left: Path, places: Path) -> dict[str, Any]:
    """The rollout as it was reported. Asserts that the runner was never late and did not grow."""
    pulse, memory = Pulse(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    files = {"tests/test_calc.py": "def test_two():\n    assert True\n"}
    job = Assignment(Task("t", "Work."), Files(files), Leaves(name, left), ProcessRuntime(places), CommandCheck("true"))
    beating = asyncio.create_task(pulse.beat())
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    beating.cancel()
    assert pulse.late < LATE_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < GROWN_KB
    assert not any(server.failures.values())
    (body,) = server.finished.values()
    return body


@pytest.mark.parametrize("name", LOGS)
async def test_a_log_that_grows_when_it_is_decoded_has_a_problem(name: str, server: Stub, tmp_path: Path) -> None:
    (left := tmp_path / "left").mkdir()
    await asyncio.to_thread(LOGS[name], left)
    body = await rolled_out(server, name, left, tmp_path / "places")
    assert body["status"] == "succeeded"
    assert server.rewards[0]["value"] == 1.0
    (log,) = server.logs.values()
    assert "the log can't be read: reading it" in log["problem"]


NESTED = "tests/test_nested.py"
SCANNED: dict[str, dict[str, str]] = {
    "deep expression": {NESTED: "x = " + "-" * 200_000 + "1\n"},
    "deep brackets": {NESTED: "x = " + "(" * 100_000 + "\n"},
    "long lines": {
        name: f"{start}{' ' * 250_000}\n"
        for name, start in (("conftest.py", "x.outcome"), (".env", "LD_PRELOAD"), (".bashrc", ""), ("setup.cfg", "-p"))
    },
    "many tests": {f"tests/test_{n}.py": "def test_x(): pass\n" * 10_000 for n in range(4)},
}


@pytest.mark.parametrize("name", SCANNED)
async def test_a_file_that_is_slow_to_scan_delays_nobody(name: str, server: Stub, tmp_path: Path) -> None:
    """The scan itself ends in seconds of processor time."""
    Files(SCANNED[name])(tmp_path / "left")
    began = time.monotonic()
    body = await rolled_out(server, "scripted", tmp_path / "left", tmp_path / "places")
    assert time.monotonic() - began < 30
    assert body["status"] == "succeeded"


async def test_a_workspace_that_can_not_be_scanned_is_counted(
    server: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its rollout ends as it would have ended."""

    async def read(function: Any, *args: Any) -> Any:
        if function is acts_since:
            raise Unreadable("reading it takes more than 512 MB of memory")
        return await read_untrusted(function, *args)

    monkeypatch.setattr(lifecycle, "read_untrusted", read)
    Files({".env": "A=1\n"})(tmp_path / "left")
    body = await rolled_out(server, "scripted", tmp_path / "left", tmp_path / "places")
    assert [act["kind"] for act in body["tampering"]] == ["unreadable"]
    assert (body["status"], server.rewards[0]["value"]) == ("succeeded", 1.0)


async def test_work_that_can_not_be_read_is_worth_nothing(server: Stub, tmp_path: Path) -> None:
    """It is no failure of the infrastructure, which would be tried again."""

    class Evaluator:
        name, needs_clean_workspace, reward_files = "strict", False, ()

        async def evaluate(self, evidence: Evidence) -> Verdict:
            raise Unreadable("the agent's changes have more data than may be copied")

    Files({"a": "1"})(tmp_path / "left")
    agent = Leaves("x", tmp_path / "left")
    job = Assignment(Task("t", "Work."), Files({}), agent, ProcessRuntime(tmp_path / "places"), Evaluator())
    async with AdminClient(server.url, "admin") as client:
        await run_groups(RolloutRunner(client), [job], policy="p", n=1)
    (body,) = server.finished.values()
    assert (body["status"], server.rewards[0]["value"]) == ("succeeded", 0.0)
    assert [act["kind"] for act in body["tampering"]] == ["unreadable"]
