"""The `command` evaluator: a shell command whose exit code, or the reward file it writes, is the reward."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rolltap.errors import NoReward
from rolltap.harnesses.base import Command, Evidence, Exit, Score, Verdict, Workspace, last_line
from rolltap.harnesses.evaluators.base import CodePlace, EvaluatorTable
from rolltap.harnesses.evaluators.programs import place_of, run_program
from rolltap.harnesses.evaluators.rewards import check_reward, parse_reward, read_reward
from rolltap.harnesses.left_files import LeftFiles, remove
from rolltap.harnesses.runtimes.code_sandbox import VARIABLE
from rolltap.harnesses.runtimes.folders import remove_links_to
from rolltap.harnesses.runtimes.sources import inside
from rolltap.harnesses.threads import in_thread
from rolltap.tampering import TamperingAct, TamperingKind

RUN = 'bash -n -c "$1" || exit 126; exec bash -o pipefail -c "$1$2"'
"""Runs the command `$1`, then `$2`. One that bash can't parse exits with 126: bash's own status for that may also be a
test's."""
PIPES = """

ended=$? parts="${PIPESTATUS[*]}"; [[ $ended = 141 && $parts =~ ^((0|141)' ')+0$ ]] && ended=0; exit $ended"""
"""Ends with 0 after a pipeline whose last part succeeded, and stopped reading before the others had written all: with
`pipefail` their signal, SIGPIPE, would be its status. Behind `&&`, that status has skipped a part of the command. It
begins with an empty line, as the command may end with a backslash."""


class CommandCheck(EvaluatorTable, tag="command", frozen=True):
    """Runs `command` with bash, with `pipefail`, in the agent's working copy.

    With `reward_file` (below the working copy) the file's content is the reward, and a missing file is an error.
    Without it, the reward is 1.0 for exit code 0, else 0.0. A status that is no verdict is an error (`check_ran`).
    With `reads_only` the command starts nothing of the working copy, and need not use `$ROLLTAP_SANDBOXED`.
    `takes`: patterns of the changes that come in (`intake.py`); () for the allow-list.
    """

    example = '{"kind": "command", "command": "test -f calc.py"}'
    code_place = CodePlace.APART

    command: str
    reward_file: str = ""
    reads_only: bool = False
    takes: tuple[str, ...] = ()

    @property
    def needs_clean_workspace(self) -> bool:
        return bool(self.takes) or (VARIABLE in self.command and not self.reads_only)

    def __post_init__(self) -> None:
        if not any(line.strip() and not line.lstrip().startswith("#") for line in self.command.split("\n")):
            raise ValueError("`command` runs nothing, so every run would be rewarded")
        if self.reward_file:
            inside(self.reward_file)

    @property
    def reward_files(self) -> tuple[str, ...]:
        return (self.reward_file,) if self.reward_file else ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        place, about = await place_of(evidence, self.command, self.takes, self.reward_files, reads_only=self.reads_only)
        workspace, aliases = place.workspace, list[str]()
        if self.reward_file:
            aliases = await in_thread(_clear, workspace, self.reward_file)
        pipes = "" if "&&" in self.command else PIPES
        launch = Command(("/bin/bash", "-c", RUN, "bash", self.command, pipes))
        step = "the evaluator's command"
        end = await run_program(evidence, place, step, launch)
        exit_ = end.exit
        detail = {"command": self.command, "code": exit_.code, "seconds": exit_.seconds, **about, **end.detail}
        with end.blamed():
            end.check_ran(step)
            try:
                value = await self._value(evidence, workspace, exit_) if self.reward_file else float(exit_.code == 0)
            except NoReward:
                if not aliases:
                    raise
                value = 0.0
        acts = [TamperingAct.at(TamperingKind.REWARD_FILE, f"{each} -> {self.reward_file}") for each in aliases]
        return Verdict((Score(value),), detail, tampering=tuple(acts))

    async def _value(self, evidence: Evidence, workspace: Workspace, exit_: Exit) -> float:
        text = await in_thread(read_reward, workspace.folder, self.reward_file)
        if text is None:
            raise NoReward(f"the evaluator wrote no reward to {self.reward_file}: {last_line(exit_.output)}")
        evidence.seen.add(self.reward_file, text)
        return check_reward(parse_reward(text))


def _clear(workspace: Workspace, path: str) -> list[str]:
    """Removes whatever is at the path of the reward file, and the links that lead there, which it returns. In its path,
    anything but a folder becomes an empty folder, and folders become writable."""
    step = workspace.folder
    for part in Path(path).parts[:-1]:
        step = step / part
        if os.path.lexists(step) and (step.is_symlink() or not step.is_dir()):
            remove(step)
            step.mkdir()
        if step.is_dir():
            step.chmod(step.stat().st_mode | stat.S_IRWXU)
    remove(workspace.folder / path)
    return remove_links_to(LeftFiles(workspace.folder), workspace.workdir, str(inside(path)))
