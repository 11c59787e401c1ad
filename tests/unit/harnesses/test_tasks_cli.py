"""What the commands for tasks take and show."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rolltap.cli.main import app
from rolltap.cli.server_address import PlaneClient
from rolltap.cli.tasks import (
    RunRequest,
    describe,
    groups_table,
    policy_or_roles,
    print_failures,
    run_tasks,
    submissions_table,
)
from rolltap.contract.planes import AdminPlane
from rolltap.errors import TaskInvalid
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.runner.specs import Defaults, resolve_paths
from rolltap.harnesses.runner.tasks import read_tasks
from rolltap.http_client import AsyncHttpClient
from rolltap.reading.types import RolloutDetail
from rolltap.types import Cause, Reward, Rollout, RolloutStatus, Scoring

from ..cli.plane import served, stub_plane, submission


def test_a_policy_or_roles() -> None:
    assert policy_or_roles("tiny") == "tiny"
    assert policy_or_roles("") == ""
    assert policy_or_roles("solver=tiny, judge=frozen") == {"solver": "tiny", "judge": "frozen"}


@pytest.mark.parametrize("given", ["solver=", "solver=tiny,solver=frozen", "solver=tiny,frozen"])
def test_what_is_neither(given: str) -> None:
    with pytest.raises(TaskInvalid, match="ROLE=NAME"):
        policy_or_roles(given)


def test_a_narrow_terminal_still_shows_whole_ids() -> None:
    """They are what `rolltap cancel` and `rolltap run --id` take."""
    one = submission("01m7yzs0t8kqv89pmhs7", policy="tiny", n=4, reward_mean=0.5, rollouts={"succeeded": 4})
    console = Console(width=80)
    with console.capture() as shown:
        console.print(submissions_table([one]))
    assert one.id in shown.get()


@pytest.mark.parametrize("status", list(RolloutStatus))
def test_rollouts_that_were_left_out_count_neither_as_successes_nor_in_the_mean(
    status: RolloutStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    def rollout(name: str, status: RolloutStatus, scoring: Scoring, value: float) -> Rollout:
        rewards = (Reward("w", name, value),)
        return Rollout(name, "g", "t", 0, status, scoring=scoring, rewards=rewards, reason=f"{name} is why")

    good = [rollout(f"good{value}", RolloutStatus.SUCCEEDED, Scoring.SCORED, value) for value in (1.0, 0.5)]
    left_out = rollout("left-out", status, Scoring.UNSCORABLE, 9.0)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(groups_table([("t", [*good, left_out])]))
    cells = [line.split("│")[1:-1] for line in shown.get().splitlines() if " t " in line]
    assert [[cell.strip() for cell in row] for row in cells] == [["t", "3", "2", "0.750", "1 0.5"]]
    is_said = status.terminal and status is not RolloutStatus.CANCELLED
    assert print_failures([("t", [*good, left_out])]) == is_said
    assert ("left-out is why" in capsys.readouterr().out.replace("\n", " ")) is is_said


def test_a_failed_rollout_shows_all_that_its_evaluator_saw() -> None:
    rollout = Rollout("r", "g", "t", 0, RolloutStatus.FAILED, 2, "s", cause=Cause.EVALUATION, reason="no report")
    seen = "=== the tests ===\n" + "\n".join(f"line {number}" for number in range(1000)) + "\n"
    shown = describe(RolloutDetail(rollout, None, None, seen, 2))
    assert "failed (evaluation): no report" in shown
    assert shown.endswith(seen)


def test_a_harness_that_is_not_here_is_named_before_anything_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ROLLTAP_HARNESSES", str(tmp_path))
    monkeypatch.setenv("ROLLTAP_ADMIN_KEY", "k")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t", "instruction": "Go.", "evaluator": {"kind": "command", "command": "true"}}\n')
    words = ["run", str(tasks), "--harness", "codex", "--runtime", "process"]
    with stub_plane({"GET /policies": {"policies": [served("p")]}}) as plane:
        result = CliRunner().invoke(app, [*words, "--url", plane.url])
    assert result.exit_code == 1
    assert result.output == "rolltap: codex is not installed on this machine: rolltap harness install codex\n"
    assert [name for name, _ in plane.requests] == ["GET /policies"]


@pytest.mark.parametrize(("here", "state"), [(True, "stopped"), (False, "nodes go on")])
async def test_a_run_that_is_interrupted_says_how_it_goes_on(
    here: bool, state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("rolltap.cli.tasks._run_here", interrupted)
    monkeypatch.setattr("rolltap.cli.tasks.follow", interrupted)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": "t", "instruction": "Go.", "evaluator": {"kind": "command", "command": "true"}}\n')
    defaults = Defaults(harness="command", argv=("true",), runtime="process")
    request = RunRequest([resolve_paths(task, defaults) for task in read_tasks(tasks)], 1, 1, id="one", here=here)
    replies = {"GET /policies": {"policies": [served("p")]}, "POST /tasks": msgspec.to_builtins(submission())}
    with stub_plane(replies) as plane, pytest.raises(asyncio.CancelledError):
        await run_tasks(PlaneClient("admin", plane.url, "k"), request, defaults)
    assert f"{state}; the same command with --id one goes on, rolltap cancel one ends it" in capsys.readouterr().err


async def test_tasks_of_several_requests_show_progress_and_how_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tasks.jsonl"
    task = {"instruction": "x" * 600_000, "evaluator": {"kind": "command", "command": "true"}}
    path.write_text("".join(json.dumps({"id": f"t{number}", **task}) + "\n" for number in range(3)))
    defaults = Defaults(harness="command", argv=("true",), runtime="process")
    tasks = [resolve_paths(task, defaults) for task in read_tasks(path)]
    request = RunRequest(tasks, 1, 1, id="one", here=False, detach=True)
    replies = {"GET /policies": {"policies": [served("p")]}, "POST /tasks": msgspec.to_builtins(submission())}
    with stub_plane(replies) as plane:
        assert not await run_tasks(PlaneClient("admin", plane.url, "k"), request, defaults)
        assert [name for name, _ in plane.requests] == ["GET /policies", *["POST /tasks"] * 3]
        shown = capsys.readouterr().out
        assert "submission one: tasks sent" in shown
        assert "3/3" in shown

        async def interrupted(client: AdminClient, operation: Any, *given: Any) -> Any:
            if operation is AdminPlane.submit:
                raise asyncio.CancelledError
            return await AsyncHttpClient.ask(client, operation, *given)

        monkeypatch.setattr(AdminClient, "ask", interrupted)
        with pytest.raises(asyncio.CancelledError):
            await run_tasks(PlaneClient("admin", plane.url, "k"), request, defaults)
    assert "nothing is queued; the same command with --id one goes on" in capsys.readouterr().err
