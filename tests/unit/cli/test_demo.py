"""The demo's folder, figures and reward, and what it says where its agent does not run."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from rolltap.cli import demo
from rolltap.cli.demo import MARKER, prepare_folder, share
from rolltap.demo import learn
from rolltap.demo.learn import DemoRecipe, SeedRunner, Success
from rolltap.demo.stack import DemoFailed, free_ports
from rolltap.engine.tiny.tasks import TinyTask, make_tasks
from rolltap.errors import ConfigError, EvaluatorFailed
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.base import Ending, Evidence, Exit, Job, Limits, PythonCall, Verdict
from rolltap.harnesses.runner.attempts import Progress, RolloutSummary, Slots, Stage
from rolltap.harnesses.runner.lifecycle import Assignment
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.reading.runs import wilson
from rolltap.types import RolloutStatus, Task


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds files that no demo wrote, 'thesis\.txt' among them"):
        prepare_folder(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_folder_that_only_looks_like_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match="'data'"):
        prepare_folder(tmp_path)
    assert (tmp_path / "data").exists()


def test_its_ports_are_different_and_none_that_a_connection_may_take() -> None:
    ports = free_ports(200)
    assert len(set(ports)) == 200
    with socket.create_server(("127.0.0.1", 0)) as any_port:
        assert any_port.getsockname()[1] > max(ports)


def test_a_former_demos_files_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_folder(out)
    (out / "data").mkdir()
    (out / "data" / "rolltap.db").touch()
    (out / "seed-12").mkdir()
    (out / "engine.log").touch()
    prepare_folder(out)
    assert [path.name for path in out.iterdir()] == [MARKER]


def test_what_was_put_beside_a_demos_files_is_left_alone(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "notes.md").touch()
    with pytest.raises(ConfigError, match=r"'notes\.md'"):
        prepare_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {MARKER, "data", "notes.md"}


@pytest.mark.filterwarnings("ignore:No artists")  # no seed, no curve
def test_the_report_goes_into_the_demos_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demo.run(seeds=[], out=tmp_path / "out", recipe=DemoRecipe(), shuffle_rewards=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["seeds"] == []


@pytest.mark.parametrize(
    ("success", "n", "low", "high"), [(0.5, 10, 0.2366, 0.7634), (0.0, 10, 0.0, 0.2775), (54 / 64, 64, 0.7360, 0.9128)]
)
def test_the_interval_is_wilsons(success: float, n: int, low: float, high: float) -> None:
    assert wilson(success, n) == pytest.approx((low, high), abs=1e-3)


def test_a_share_is_shown_with_its_interval() -> None:
    assert share(0.5, 10) == "0.50 (0.24 to 0.76)"


async def evaluate_with(task: TinyTask, name: str, make: Callable[[Path], None], ending: Ending) -> Verdict:
    """The demo's verdict on a rollout of `task` that left the file `name`."""

    def setup(folder: Path) -> None:
        task.setup(folder)
        make(folder / name)

    workspace = await ThreadRuntime().prepare(setup)
    evidence = Evidence(Task("t", task.instruction), Exit(ending, 1.0), workspace, None, Limits())  # type: ignore[arg-type]
    try:
        return await Success(task).evaluate(evidence)
    finally:
        await workspace.close()


@pytest.mark.parametrize(("ending", "reward"), [(Ending.DONE, 1.0), (Ending.LIMIT, 0.0), (Ending.CRASHED, 0.0)])
async def test_a_task_done_without_a_submission_is_no_success(ending: Ending, reward: float) -> None:
    task = next(task for task in make_tasks(0, 8, "train") if task.kind.name == "create")

    verdict = await evaluate_with(task, task.first, Path.touch, ending)
    assert [score.value for score in verdict.scores] == [reward]


async def test_what_the_agent_left_fails_the_evaluation_and_not_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(task: TinyTask, folder: Path) -> bool:
        raise OSError("unreadable")

    monkeypatch.setattr(TinyTask, "check", read)
    with pytest.raises(EvaluatorFailed, match="the check raised OSError"):
        await evaluate_with(make_tasks(0, 1, "train")[0], "left", Path.touch, Ending.DONE)


@dataclass(frozen=True, slots=True)
class BrokenAgent(MiniSweAgentInProcess):
    def launch(self, job: Job) -> PythonCall:
        def run(stop: threading.Event) -> tuple[Ending, str]:
            return Ending.CRASHED, "ImportError: no module 'agent'"

        return PythonCall(run)


@pytest.mark.acceptance
def test_a_demo_whose_agent_does_not_run_says_why_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn, "MiniSweAgentInProcess", BrokenAgent)
    with pytest.raises(DemoFailed, match=r"the agent failed on every task: .*ImportError: no module 'agent'"):
        demo.run(seeds=[0], out=tmp_path / "out", recipe=DemoRecipe(steps=1, held_out=2), shuffle_rewards=False)


@pytest.mark.parametrize("status", [status for status in RolloutStatus if status.terminal])
@pytest.mark.parametrize("kind", ["all", "some", "one kind"])
async def test_a_rollout_without_a_reward_is_no_failure_of_the_policy(
    status: RolloutStatus, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An evaluator that failed before the training, and not after it, would make a gain of nothing."""
    lost = {"all": lambda place, task: True, "some": lambda place, task: place % 2 == 0}.get(
        kind, lambda place, task: task["kind"] == "create"
    )
    notes: list[str] = []

    @dataclass
    class Runner:
        client: object
        slots: Slots
        progress: Callable[[Progress], None]

    async def ended(runner: Runner, assignments: Sequence[Assignment], **_: object) -> None:
        for place, one in enumerate(assignments):
            is_lost = lost(place, one.task.spec)
            end = status if is_lost else RolloutStatus.SUCCEEDED
            summary = RolloutSummary("r", one.task.id, end, None, None if is_lost else 1.0, "why", 1, "s", {})
            runner.progress(Progress("r", one.task.id, Stage.ENDED, summary))

    monkeypatch.setattr(learn, "RolloutRunner", Runner)
    monkeypatch.setattr(learn, "run_groups", ended)
    runner = SeedRunner(None, DemoRecipe(), 0, None, lambda part, count, text: notes.append(text))  # type: ignore[arg-type]
    tasks = make_tasks(0, 16, "held_out")
    if kind == "all":
        with pytest.raises(DemoFailed, match="why"):
            await runner.play(None, tasks, "p", "before")  # type: ignore[arg-type]
        return
    by_kind = await runner.play(None, tasks, "p", "before")  # type: ignore[arg-type]
    left = sum(not lost(place, {"kind": task.kind.name}) for place, task in enumerate(tasks))
    assert 0 < left < 16
    assert sum(map(len, by_kind.values())) == left
    assert {reward for rewards in by_kind.values() for reward in rewards} == {1.0}
    assert notes[-1] == f"success 1.00, {16 - left} not measured"
