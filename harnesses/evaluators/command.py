"""The `command` evaluator: a shell command whose exit code, or the reward file it writes, is the reward."""

from __future__ import annotations

import math
from pathlib import Path

from rolltap.errors import EvaluatorFailed
from rolltap.harnesses.base import Command, Evidence, Score, Verdict
from rolltap.harnesses.evaluators.base import EvaluatorTable
from rolltap.harnesses.evaluators.exit_status import check_survived, verdict_status
from rolltap.harnesses.output import last_line, read_output
from rolltap.harnesses.sources import inside

RUN = 'bash -n -c "$1" || exit 126; exec bash -o pipefail -c "$1"'
"""Runs the command `$1`. One that bash can't parse could not run: bash's own status for that is also a test's."""


class CommandCheck(EvaluatorTable, tag="command", frozen=True):
    """Runs `command` with bash, with `pipefail`, in the agent's working copy.

    With `reward_file` (below the working copy) the file's content is the reward, and a missing file is an error.
    Without it, the reward is 1.0 for exit code 0, else 0.0; a status that is no verdict (`exit_status`) is an error.
    """

    example = '{"kind": "command", "command": "test -f calc.py"}'

    command: str
    reward_file: str = ""

    def __post_init__(self) -> None:
        if self.reward_file:
            inside(self.reward_file)

    @property
    def reward_files(self) -> tuple[str, ...]:
        return (self.reward_file,) if self.reward_file else ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        workspace = evidence.workspace
        reward_path = workspace.folder / self.reward_file
        if self.reward_file:
            _clear(workspace.folder, reward_path)
        launch = Command(("/bin/bash", "-c", RUN, "bash", self.command))
        exit_ = await evidence.run(workspace, "the evaluator's command", launch)
        detail = {"command": self.command, "code": exit_.code, "seconds": exit_.seconds}
        if not self.reward_file:
            return Verdict((Score(float(verdict_status(exit_, "the evaluator's command") == 0)),), detail)
        if not _is_plain(workspace.folder, reward_path):
            raise EvaluatorFailed(f"the evaluator wrote no reward to {self.reward_file}: {last_line(exit_.output)}")
        check_survived(exit_, "the evaluator's command")
        text = read_output(reward_path)
        evidence.seen.add(self.reward_file, text)
        return Verdict((Score(parse_reward(text)),), detail)


def _is_plain(folder: Path, path: Path) -> bool:
    """True if `path` is a regular file below `folder`, without a link in the path."""
    return path.is_file() and path.resolve() == folder.resolve() / path.relative_to(folder)


def _clear(folder: Path, path: Path) -> None:
    """Removes a reward file that the agent wrote, or a link in its path."""
    step = folder
    for part in path.relative_to(folder).parts:
        step = step / part
        if step.is_symlink() or step.is_file():
            step.unlink()
            return


def parse_reward(text: str) -> float:
    """`text` as a number. Raises `EvaluatorFailed` unless it is a finite number."""
    try:
        value = float(text.strip())
    except ValueError:
        raise EvaluatorFailed(f"the reward {text.strip()[:80]!r} is not a number") from None
    if not math.isfinite(value):
        raise EvaluatorFailed(f"the reward is {value}; a reward is a finite number")
    return value
