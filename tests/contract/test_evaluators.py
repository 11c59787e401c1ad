"""What every evaluator promises, over the registry and over those that installed packages bring.

Each is tried with its own example, on a small project that an agent worked on. A new evaluator needs no line here.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rolltap.errors import EvaluatorFailed, TaskInvalid
from rolltap.extras import known_names
from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, RuntimeOptions, Verdict, Workspace
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.base import EvaluatorTable
from rolltap.harnesses.evaluators.registry import ENTRY_POINTS, EVALUATORS, evaluator_class, parse_evaluator
from rolltap.harnesses.runner.specs import check
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import Task

from ..plain_python import plain_python
from ..unit.harnesses.environments import signed
from ..unit.harnesses.stub import Stub, running

NAMES = known_names(EVALUATORS, ENTRY_POINTS)
PROJECT = {
    "calc.py": "def add(a, b):\n    return a + b\n",
    "tests/test_calc.py": "from calc import add\n\ndef test_add():\n    assert add(1, 1) == 2\n",
}
TASK = Task("t", "Check add.")
TEST_SH = "echo 1 > /logs/verifier/reward.txt\n"
PRINTED = {"environment": signed({"reward": 0.5, "parts": {"right": 0.5}}, "s")}
"""What the harness printed, where an evaluator reads it."""


def example(kind: str) -> dict[str, object]:
    return json.loads(evaluator_class(kind).example)


@pytest.fixture
async def client() -> AsyncIterator[AdminClient]:
    async with (
        running(Stub(lambda messages: {"role": "assistant", "content": "SCORE: 5"})) as stub,
        AdminClient(stub.url, "admin") as client,
    ):
        yield client


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    """Where a task's own files lie: all that an example may name."""
    folder = tmp_path / "task"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test.sh").write_text(TEST_SH)
    return folder


@asynccontextmanager
async def evidence(settings: EvaluatorTable, folder: Path, evaluate_s: float) -> AsyncIterator[Evidence]:
    """What is left of a project that an agent worked on in a sandbox."""
    runtime = BubblewrapRuntime.create(RuntimeOptions(folder / "workspaces", needs=settings.needs))
    async with AsyncExitStack() as stack:

        async def prepare() -> Workspace:
            workspace = await runtime.prepare(Files(PROJECT))
            stack.push_async_callback(workspace.close)
            return workspace

        workspace = await prepare()
        (workspace.folder / "notes.txt").write_text("done")
        exit_ = Exit(Ending.DONE, 1.0, 0, PRINTED.get(settings.name, "I am done."))
        yield Evidence(TASK, exit_, workspace, prepare, Limits(evaluate_s=evaluate_s), "s", "r", harness=settings.name)


@pytest.mark.parametrize("kind", NAMES)
def test_the_example_is_a_table_of_its_kind_and_survives_the_ledger(kind: str) -> None:
    table = example(kind)
    settings = parse_evaluator(table)
    assert table["kind"] == kind
    assert parse_evaluator(msgspec.to_builtins(settings)) == settings


@pytest.mark.parametrize("kind", NAMES)
def test_an_unknown_key_is_refused_with_the_example(kind: str) -> None:
    with pytest.raises(TaskInvalid, match=r"field `surprise` is unknown; for example \{") as refused:
        parse_evaluator({**example(kind), "surprise": 1})
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("kind", NAMES)
def test_paths_are_absolute_before_a_node_sees_them(kind: str, task_folder: Path) -> None:
    settings = parse_evaluator(example(kind)).resolve_paths(task_folder)
    assert all(Path(path).is_absolute() for path in settings.paths)
    assert settings.resolve_paths(Path("/elsewhere")) == settings
    spec = {"evaluator": msgspec.to_builtins(settings), "harness": "codex"}
    check(Task("t", "Check add.", spec), ["judge"])
    if parse_evaluator(example(kind)).paths:
        with pytest.raises(TaskInvalid, match="relative"):
            check(Task("t", "Check add.", {**spec, "evaluator": example(kind)}), ["judge"])


@pytest.mark.parametrize("kind", NAMES)
async def test_the_verdict_is_finite_and_can_be_stored(
    kind: str, task_folder: Path, tmp_path: Path, client: AdminClient
) -> None:
    settings = parse_evaluator({**example(kind), **python_of(kind)}).resolve_paths(task_folder)
    evaluator = settings.build(client)
    assert evaluator.name == kind
    async with evidence(settings, tmp_path, 60) as left:
        verdict = await evaluator.evaluate(left)
    assert verdict.scores
    assert all(math.isfinite(score.value) for score in verdict.scores)
    assert {score.scope.partition(":")[0] for score in verdict.scores} <= {"rollout", "role", "call", "span"}
    json.dumps([verdict.detail, *(score.detail for score in verdict.scores)], allow_nan=False)


@pytest.mark.parametrize("kind", NAMES)
async def test_an_evaluation_without_time_fails_in_one_line_or_needs_none(
    kind: str, task_folder: Path, tmp_path: Path, client: AdminClient
) -> None:
    settings = parse_evaluator(example(kind)).resolve_paths(task_folder)
    async with evidence(settings, tmp_path, 0) as left:
        outcome = await asyncio.gather(settings.build(client).evaluate(left), return_exceptions=True)
    assert isinstance(outcome[0], EvaluatorFailed | Verdict)
    assert "\n" not in str(outcome[0])


def python_of(kind: str) -> dict[str, str]:
    """The interpreter that has pytest."""
    return {"python": plain_python()} if kind == "pytest" else {}
