"""The node agent: takes what it has room for, says that it lives, and lets go of what is no longer its own."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolltap.harnesses import threads
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.runner.attempts import Progress, Slots, Stage
from rolltap.harnesses.runner.node import NodeAgent, NodeSettings
from rolltap.harnesses.runner.specs import Defaults
from rolltap.harnesses.runtimes import folders
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Empty

from .stub import Stub, running, tool_call


@pytest.fixture
async def server() -> AsyncIterator[Stub]:
    async with running(Stub(lambda messages: tool_call("true"))) as stub:
        yield stub


def rollout(number: int, argv: tuple[str, ...] = ("true",), **spec: object) -> dict[str, object]:
    task = {
        "id": f"t{number}",
        "instruction": "x",
        "spec": {"harness": "command", "argv": argv, "evaluator": {"kind": "session_completed"}, **spec},
        "tags": [],
    }
    return {"rollout_id": f"r{number}", "token": f"token{number}", "policy": "p", "task": task}


def workspaces_in(base: Path) -> list[Path]:
    return list(base.iterdir())


def settings(ttl: float = 15.0) -> NodeSettings:
    return NodeSettings("n1", Slots(run=2, ahead=1), ttl, wait=0.05)


async def test_it_runs_everything_there_is(server: Stub, tmp_path: Path) -> None:
    server.pending = [rollout(number) for number in range(7)]
    busiest = 0
    stages: dict[str, Stage] = {}

    def progress(step: Progress) -> None:
        nonlocal busiest
        stages[step.rollout_id] = step.stage
        busiest = max(busiest, sum(stage is Stage.RUN for stage in stages.values()))

    async with AdminClient(server.url, "admin") as client:
        agent = NodeAgent(client, settings(), Defaults(workspaces=tmp_path), progress)
        await agent.run(asyncio.Event(), until_idle=True)
    assert {body["status"] for body in server.finished.values()} == {"succeeded"}
    assert len(server.finished) == 7
    assert all(body["node_token"] == f"token{name[1:]}" for name, body in server.finished.items())
    assert busiest <= 2
    assert server.released == ["n1"]


async def test_a_task_that_this_node_cannot_run_fails_with_the_reason(server: Stub, tmp_path: Path) -> None:
    server.pending = [rollout(1, runtime="podman"), rollout(2)]
    async with AdminClient(server.url, "admin") as client:
        await NodeAgent(client, settings(), Defaults(workspaces=tmp_path)).run(asyncio.Event(), until_idle=True)
    assert server.finished["r1"]["status"] == "failed"
    assert "no runtime 'podman'" in server.finished["r1"]["reason"]
    assert server.finished["r2"]["status"] == "succeeded"


async def test_what_was_given_to_another_node_is_killed_and_no_more_is_said_of_it(server: Stub, tmp_path: Path) -> None:
    server.pending = [rollout(1, ("sleep", "60"))]
    runs, ended = asyncio.Event(), asyncio.Event()

    def progress(step: Progress) -> None:
        if step.stage is Stage.RUN:
            runs.set()

    async def lose() -> None:
        await runs.wait()
        server.held["r1"] = "n2"
        while workspaces_in(tmp_path):  # noqa: ASYNC110  the folder is what an onlooker sees
            await asyncio.sleep(0.02)
        ended.set()

    async with AdminClient(server.url, "admin") as client:
        agent = NodeAgent(client, settings(ttl=0.2), Defaults(workspaces=tmp_path), progress)
        losing = asyncio.create_task(lose())
        await agent.run(ended)
        await losing
    assert not server.finished
    assert not server.rewards


async def test_a_node_that_is_stopped_gives_back_what_it_holds(server: Stub, tmp_path: Path) -> None:
    server.pending = [rollout(1, ("sleep", "60"))]
    stop = asyncio.Event()

    def progress(step: Progress) -> None:
        if step.stage is Stage.RUN:
            stop.set()

    async with AdminClient(server.url, "admin") as client:
        await asyncio.wait_for(NodeAgent(client, settings(), Defaults(workspaces=tmp_path), progress).run(stop), 20)
    assert server.released == ["n1"]
    assert not server.finished
    assert not workspaces_in(tmp_path)


async def test_slow_work_on_agents_files_delays_no_heartbeat(
    server: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many agents leave millions of files, whose removal takes minutes."""
    over = threading.Event()
    workspaces = [await ProcessRuntime(tmp_path).prepare(Empty()) for _ in range(40)]
    monkeypatch.setattr(folders, "_remove", lambda root: over.wait(60))
    closing = [asyncio.create_task(each.close()) for each in workspaces]
    try:
        async with AdminClient(server.url.replace("127.0.0.1", "localhost"), "admin") as client:
            for _ in range(3):
                await asyncio.wait_for(client.heartbeat("n1", [], ttl=15), 10)
    finally:
        over.set()
        await asyncio.gather(*closing)


def test_work_on_agents_files_has_threads_of_its_own() -> None:
    folder = Path(threads.__file__).resolve().parent
    others = re.compile(r"to_thread\((?!end_tree,)|run_in_executor\(None")
    assert [path for path in folder.rglob("*.py") if others.search(path.read_text())] == []
