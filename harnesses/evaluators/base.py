"""The `evaluator` table of a task: one class per kind, each in its own file.

An evaluator is a subclass of `EvaluatorTable` and one line in `registry.py`; an outside package registers its class in
the entry point group `rolltap.evaluators`. The class's fields are the keys of the table, its tag is the table's `kind`.
Most classes are the evaluator itself, too: they have `evaluate`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Self, cast

import msgspec

from rolltap.harnesses.base import Evaluator, choice
from rolltap.harnesses.client import AdminClient


class CodePlace(StrEnum):
    """Where code of the working copy runs while an evaluator scores it."""

    NOWHERE = "nowhere"  # it only reads files, or none
    RUNNER = "runner"  # in the runner's process, if the evaluator imports it
    TESTS = "tests"  # in the process that counts its results
    APART = "apart"  # in the second sandbox, if its program uses `$ROLLTAP_SANDBOXED`; else beside the program


class CallRubric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model of `policy` scores each of the agent's calls by `rubric`."""

    policy: str
    rubric: str

    def __post_init__(self) -> None:
        if not self.rubric.strip():
            raise ValueError("the rubric is empty")

    def check(self, policies: Collection[str]) -> None:
        choice("policy", self.policy, dict.fromkeys(policies))


class EvaluatorTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", kw_only=True):
    """Base of evaluator tables. The defaults fit an evaluator that needs no file and no policy.

    `call_rubric`: rewards of calls beside the evaluator's own (`call_rubric.WithCallScores`).
    """

    call_rubric: CallRubric | msgspec.UnsetType = msgspec.UNSET

    example: ClassVar[str]
    """A valid table as JSON, for the error message if a task's table is wrong."""

    code_place: ClassVar[CodePlace] = CodePlace.NOWHERE

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def needs_clean_workspace(self) -> bool:
        return False

    @property
    def reward_files(self) -> tuple[str, ...]:
        return ()

    def check(self, policies: Collection[str]) -> None:
        """Raises `TaskInvalid` if no node can evaluate by this table. `policies` are the served ones."""

    def resolve_paths(self, base: Path) -> Self:
        """The same table, with relative paths made absolute by `base`."""
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of files that a node must have."""
        return ()

    @property
    def needs(self) -> tuple[Path, ...]:
        """Folders of this machine that a sandbox must mount for the evaluation, read-only."""
        return ()

    def build(self, client: AdminClient) -> Evaluator:
        """The evaluator, on the node that runs it. Raises `TaskInvalid` if something is missing there."""
        return cast(Evaluator, self)
