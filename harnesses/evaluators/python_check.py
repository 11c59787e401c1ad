"""The `python` evaluator: a callable inspects the working copy and returns the reward, or several by scope."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rolltap.errors import EvaluatorFailed, NoReward, TaskInvalid
from rolltap.harnesses.base import Command, Evidence, Score, Verdict, last_line
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.base import CodePlace, EvaluatorTable
from rolltap.harnesses.evaluators.python_child import Check, load_check, values_of
from rolltap.harnesses.evaluators.rewards import check_reward
from rolltap.harnesses.left_files import LeftFiles
from rolltap.harnesses.runtimes.folders import remove_traps
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Empty, located
from rolltap.harnesses.threads import contained, in_thread

RUN = "import sys; from rolltap.harnesses.evaluators.python_child import run_check; run_check(*sys.argv[1:])"
RESULT = "result.json"
"""In the HOME of the check's process, which no agent had."""


class PythonTable(EvaluatorTable, tag="python", frozen=True):
    """`callable` names a `Check`: `module:function` on the runner's path, or `FILE.py:function`."""

    example = '{"kind": "python", "callable": "os.path:getsize"}'
    code_place = CodePlace.RUNNER

    callable: str

    def resolve_paths(self, base: Path) -> PythonTable:
        if not self._file:
            return self
        return msgspec.structs.replace(self, callable=f"{located(base, self._file).absolute()}:{self._function}")

    @property
    def paths(self) -> tuple[str, ...]:
        return (self._file,) if self._file else ()

    @property
    def _file(self) -> str:
        module = self.callable.rpartition(":")[0]
        return module if module.endswith(".py") else ""

    @property
    def _function(self) -> str:
        return self.callable.rpartition(":")[2]

    def build(self, client: AdminClient) -> PythonProgram:
        try:
            contained(load_check, self.callable)
        except Exception as error:  # foreign code: its import may raise anything
            raise TaskInvalid(
                f"no callable {self.callable!r} (module:function or FILE.py:function): {error}", param="evaluator"
            ) from error
        return PythonProgram(self)


@dataclass(frozen=True, slots=True)
class PythonCheck:
    """Runs `check` in a thread of this process: for checks of the program that runs the rollouts.

    Links that lead out of the working copy, and pipes, are removed first: the runner can read more than the agent.
    """

    check: Check
    name: str = "python"
    needs_clean_workspace: bool = False
    reward_files: tuple[str, ...] = ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        await _remove_traps(evidence)
        try:
            values = values_of(await in_thread(contained, self.check, evidence.workspace.folder))
        except Exception as error:  # the task's own code may raise anything
            evidence.seen.add("the check", traceback.format_exc())
            raise NoReward(f"the check raised {type(error).__name__}: {error}") from error
        return _verdict(values, getattr(self.check, "__qualname__", repr(self.check)))


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """Runs the callable of `table` in a process of its own, with the limits of the run and none of the runner's keys.

    It reads the agent's files, which may cost any amount of memory and time: the runner must not pay for that.
    """

    table: PythonTable
    name: str = "python"
    needs_clean_workspace: bool = False
    reward_files: tuple[str, ...] = ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        await _remove_traps(evidence)
        place = await ProcessRuntime().prepare(Empty())
        try:
            folder, result = evidence.workspace.folder, place.home / RESULT
            argv = (sys.executable, "-P", "-c", RUN, self.table.callable, str(folder), str(result))
            path = {"PYTHONPATH": os.pathsep.join(str(Path.cwd() / each) for each in sys.path)}
            exit_ = await evidence.run(place, "the check", Command(argv, env=path))
            if exit_.excess:
                raise EvaluatorFailed(f"the check exceeded a limit: {exit_.excess}")
            if exit_.code != 0 or not result.is_file():  # it may have crashed after its answer, too
                raise NoReward(f"the check ended with {exit_.code}: {last_line(exit_.output)}")
            answer = json.loads(result.read_text(encoding="utf-8"))
        finally:
            await place.close()
        if "error" in answer:
            raise NoReward(f"the check raised {answer['error']}")
        return _verdict(answer["values"], self.table.callable.rpartition(":")[2])


def _verdict(values: Mapping[str, float], check: str) -> Verdict:
    if not values:
        raise NoReward("the check returned no reward")
    return Verdict(tuple(Score(check_reward(value), scope) for scope, value in values.items()), {"check": check})


async def _remove_traps(evidence: Evidence) -> None:
    folder = evidence.workspace.folder
    if removed := await in_thread(remove_traps, LeftFiles(folder), folder, ()):
        evidence.seen.add("removed from the working copy", "\n".join(removed))
