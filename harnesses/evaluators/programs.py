"""Runs an evaluator's program (the judge) beside a working copy that an agent wrote.

The judge gets `$ROLLTAP_SANDBOXED`, which runs code of the working copy in a sandbox of its own (`code_sandbox.py`).
Code that it starts in another way shares the judge's sandbox and may do to the reward what the judge may: the reward's
detail then says why it is `unprotected`.

With `takes` the judge gets the task's own files and of the agent's changes only those that it names: no configuration
of a tool, no script and no link that it does not name is there, wherever the agent put it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rolltap.errors import EvaluatorFailed, Unreadable
from rolltap.harnesses.base import Command, Evidence, Exit, Workspace
from rolltap.harnesses.changes import Change, apply_changes, changes
from rolltap.harnesses.runtimes.code_sandbox import VARIABLE
from rolltap.types import UNPROTECTED

NOT_USED = "its program did not use $ROLLTAP_SANDBOXED"
APART = {
    "PYTHONSAFEPATH": "1",  # else the modules of the working copy come before Python's own
    "GIT_DIR": f"/nonexistent, start git by ${VARIABLE}",
}
"""Environment of a judge that names the helper: its own Python and git take nothing of the agent's working copy."""

DISK = "MB of disk"
"""The end of the excess of a run that took too much of the disk."""
NAMED = 20
"""The most removed files that a reward's detail names."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a judge ended, what its reward's detail says about that, and the limit that the code exceeded ("": none)."""

    exit: Exit
    detail: Mapping[str, Any]
    code_excess: str

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Raises `Unreadable` for an evaluation that fails after the code took more than it may: the agent's doing."""
        try:
            yield
        except EvaluatorFailed as failure:
            if not self.code_excess:
                raise
            raise Unreadable(f"its code took {self.code_excess}; {failure.message}") from failure


async def working_copy(evidence: Evidence, takes: tuple[str, ...]) -> tuple[Workspace, dict[str, Any]]:
    """The workspace that a judge runs in, and what its reward's detail says about it.

    Without `takes` it is the agent's; else a clean one, with those of the agent's changes that these patterns match.
    """
    if not takes:
        return evidence.workspace, {}
    clean, agents = await evidence.clean_workspace(), evidence.workspace.folder
    every = await asyncio.to_thread(changes, clean.folder, agents)
    left_out = await asyncio.to_thread(apply_changes, every, agents, clean.folder, takes=takes)
    evidence.seen.add("the agent's changes", "\n".join(listed(every, left_out)))
    return clean, {"changed": len(every), "left_out": [change.path for change in left_out[:NAMED]]}


def listed(every: Sequence[Change], left_out: Collection[Change]) -> list[str]:
    """The changes, one a line."""
    return [f"{each.kind.value} {each.path}{' (dropped)' if each in left_out else ''}" for each in every]


async def run_program(
    evidence: Evidence,
    workspace: Workspace,
    step: str,
    launch: Command,
    hidden: Sequence[str] = (),
    *,
    starts_code: bool = True,
    own_copy: bool = False,
    source: str = "",
) -> ProgramEnd:
    """Runs the judge in a working copy. `hidden`: its files there that the code can't write.

    Without `starts_code` the judge is known to start nothing of the working copy. With `own_copy` the code works in a
    copy of it. `source` is the judge's own text. Raises `Unreadable` if the code took the judge's time.
    """
    detail = dict[str, Any]()
    async with workspace.code_helper(evidence.limits, evidence.deadline, hidden, own_copy=own_copy) as helper:
        settings = {**launch.env, **helper.env}
        if VARIABLE in source and not own_copy:
            settings = {**APART, **settings}
        mounts = {**launch.mounts, **helper.mounts}
        try:
            exit_ = await evidence.run(workspace, step, replace(launch, mounts=mounts, env=settings))
        except EvaluatorFailed as failure:
            raise (Unreadable(f"its code took {helper.excess}") if helper.excess else failure) from failure
        excess = helper.excess
        if helper.runs and exit_.excess.endswith(DISK):  # the working copy counts to both
            excess = exit_.excess
    if helper.removed:
        evidence.seen.add("removed from the working copy", "\n".join(helper.removed))
        detail["removed"] = list(helper.removed[:NAMED])
    if starts_code and (helper.shared or not helper.runs):
        detail[UNPROTECTED] = helper.shared or NOT_USED
    return ProgramEnd(exit_, detail, excess)
