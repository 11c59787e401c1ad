"""The `python` evaluator: a callable inspects the working copy and returns the reward, or several by scope."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import msgspec

from rolltap.errors import EvaluatorFailed, TaskInvalid
from rolltap.harnesses.base import Evidence, Score, Verdict
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.base import CodePlace, EvaluatorTable
from rolltap.harnesses.logs.files import LeftFiles
from rolltap.harnesses.runtimes.traps import remove_traps
from rolltap.harnesses.sources import located

Check = Callable[[Path], float | Mapping[str, float]]
"""Gets the working copy; returns a number, or numbers by scope: `{"rollout": 1.0, "role:critic": 0.5}`."""


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

    def build(self, client: AdminClient) -> PythonCheck:
        try:
            return PythonCheck(getattr(self._module(), self._function))
        except Exception as error:  # foreign code: its import may raise anything
            raise TaskInvalid(
                f"no callable {self.callable!r} (module:function or FILE.py:function): {error}", param="evaluator"
            ) from error

    def _module(self) -> ModuleType:
        if not self._file:
            return importlib.import_module(self.callable.partition(":")[0])
        path = Path(self._file)
        name = f"check_{path.stem}_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:16]}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up by its name
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True, slots=True)
class PythonCheck:
    """Runs `check` in a thread. An exception in it fails the evaluation, not the runner.

    Links that lead out of the working copy are removed before, as are pipes: the runner reads what only it may.
    """

    check: Check
    name: str = "python"
    needs_clean_workspace: bool = False
    reward_files: tuple[str, ...] = ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        folder = evidence.workspace.folder
        if removed := await asyncio.to_thread(remove_traps, LeftFiles(folder), folder, ()):
            evidence.seen.add("removed from the working copy", "\n".join(removed))
        try:
            result = await asyncio.to_thread(self.check, folder)
            values = result if isinstance(result, Mapping) else {"rollout": result}
            scores = tuple(Score(float(value), scope) for scope, value in values.items())
        except Exception as error:  # the task's own code may raise anything
            evidence.seen.add("the check", traceback.format_exc())
            raise EvaluatorFailed(f"the check raised {type(error).__name__}: {error}") from error
        for score in scores:
            if not math.isfinite(score.value):
                raise EvaluatorFailed(f"the check returned {score.value}; a reward is a finite number")
        return Verdict(scores, {"check": getattr(self.check, "__qualname__", repr(self.check))})
