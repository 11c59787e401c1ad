"""Runs an evaluator's program (the judge) beside a working copy that an agent wrote.

The judge gets `$ROLLTAP_SANDBOXED`, which runs code of the working copy in a sandbox of its own (`code_sandbox.py`). Code
that it starts in another way shares the judge's sandbox and may do to the reward what the judge may: the reward's
detail then says why it is `unprotected`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolltap.harnesses.base import Command, Evidence, Exit
from rolltap.types import UNPROTECTED

NOT_USED = "its program did not use $ROLLTAP_SANDBOXED"
NAMED = 20
"""The most removed files that a reward's detail names."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a judge ended, what its reward's detail says about that, and how often it used its helper."""

    exit: Exit
    detail: Mapping[str, Any]
    code_runs: int


async def run_program(
    evidence: Evidence, step: str, launch: Command, hidden: Sequence[str] = (), *, starts_code: bool = True
) -> ProgramEnd:
    """Runs the judge in the agent's working copy. `hidden`: its files there that the code can't write.

    Without `starts_code` the judge is known to start nothing of the working copy.
    """
    workspace, detail = evidence.workspace, dict[str, Any]()
    async with workspace.code_helper(evidence.limits, evidence.deadline, hidden) as helper:
        mounts, env = {**launch.mounts, **helper.mounts}, {**launch.env, **helper.env}
        exit_ = await evidence.run(workspace, step, replace(launch, mounts=mounts, env=env))
    if helper.removed:
        evidence.seen.add("removed from the working copy", "\n".join(helper.removed))
        detail["removed"] = list(helper.removed[:NAMED])
    if starts_code and (helper.shared or not helper.runs):
        detail[UNPROTECTED] = helper.shared or NOT_USED
    return ProgramEnd(exit_, detail, helper.runs)
