"""Runs an evaluator's program (the judge) beside a working copy that an agent wrote.

The judge gets `$ROLLTAP_SANDBOXED`, a helper that runs code of the working copy in a second sandbox
(`code_sandbox.py`). A judge whose text names it runs in a clean copy of the task. Of the agent's changes, this copy
gets only those that `intake.py` allows: at the start, and again after each program that the helper ran. Such a program
works in the agent's own copy. Any other judge shares its sandbox and its files with the agent's code: the reward's
detail then says why it is `unprotected`. With `takes`, the task's patterns decide, once, at the start; the helper's
programs then work in a copy of the result.

An exit status is a verdict on the agent's work, or it means that the judge could not run. Shells reserve the statuses
from 126: 126 for a file that can't be executed, 127 for an unknown command, and 128 + n for a process that signal n
ended (-n if a runtime started it without a shell). None of these is a verdict, unless the code under evaluation ended
with it and the judge only passes it on; all others are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rolltap.errors import EvaluatorFailed, Unreadable
from rolltap.harnesses.base import CodeWork, Command, Evidence, Exit, Workspace, last_line
from rolltap.harnesses.evaluators.expectations import (
    changed_beside,
    changed_expectation,
    may_compare,
    other_name,
    reference_of,
)
from rolltap.harnesses.evaluators.intake import Intake, StartingState
from rolltap.harnesses.evaluators.judge_text import JudgeText
from rolltap.harnesses.left_files import (
    MOST_BYTES,
    MOST_FILES,
    Change,
    ChangeKind,
    CopyBudget,
    FileState,
    apply_changes,
    changes,
    file_states,
    in_order,
)
from rolltap.harnesses.runtimes.code_sandbox import VARIABLE
from rolltap.harnesses.threads import in_thread
from rolltap.types import UNPROTECTED

NOT_USED = "its program did not use $ROLLTAP_SANDBOXED"
NOT_NAMED = "its program does not name $ROLLTAP_SANDBOXED itself, so it ran among the agent's files"
UNKNOWN = "its program starts without $ROLLTAP_SANDBOXED what may be the agent's: {}"
UNDECIDED = "its verdict is what the code ends with or prints: nothing in its program decides on that"
TESTS = "its program takes the word of a test runner ({}), which the code under evaluation can make say anything"
SHARES_INPUT = "code that it runs can read the lines that its program reads: give it an input of its own (< /dev/null)"
FOLLOWS = "it reads or writes what a text of the agent's names, which may be a file of its own: {}"
REFERENCE = "code that it judges can read {}, which makes what is expected: keep that outside the working copy"
CHANGED = "it compares files of the working copy, and the agent changed {}"
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment of a judge that is trusted: else its Python would prefer modules of the copy to installed ones."""

DISK = "MB of disk"
"""How the `excess` of a run ends that used too much disk."""
MOST_LINES = 5_000
NAMED = 20
"""The most removed files that a reward's detail names."""

COULD_NOT_RUN = {
    126: "could not run (exit code 126: not executable, a missing interpreter, or not a line that bash can parse)",
    127: "could not run (exit code 127: command not found)",
}
SIGNALLED, LAST_SIGNAL = 128, 64


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a judge ended, what its reward's detail says about that, the limit that the code exceeded ("": none), and
    the code's exit codes."""

    exit: Exit
    detail: Mapping[str, Any]
    code_excess: str
    code_exits: Collection[int]

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Raises `Unreadable` if the evaluation fails after the code exceeded a limit: the agent is to blame."""
        try:
            yield
        except EvaluatorFailed as failure:
            if not self.code_excess:
                raise
            raise Unreadable(f"its code took {self.code_excess}; {failure.message}") from failure

    def check_ran(self, what: str) -> None:
        """Raises `EvaluatorFailed` if the judge could not run to its end: a reward that it wrote may be a first guess.
        It could if it only passes on the code's exit code."""
        code, line = self.exit.code, last_line(self.exit.output)
        if self.exit.excess:
            raise EvaluatorFailed(f"{what} exceeded a limit: {self.exit.excess}")
        if code in self.code_exits:
            return
        if code in COULD_NOT_RUN:
            raise EvaluatorFailed(f"{what} {COULD_NOT_RUN[code]}: {line}")
        if code is None or code < 0 or SIGNALLED <= code <= SIGNALLED + LAST_SIGNAL:
            status = "" if code is None else f" (exit code {code})"
            raise EvaluatorFailed(f"{what} was ended by a signal{status}: {line}")


@dataclass(slots=True)
class JudgesCopy:
    """The clean workspace that a judge runs in, with its `text`, as it was read, and its `source`, and what of the
    agent's copy comes in. A judge's own files stay. `brought`: what came in."""

    clean: Path
    agents: Path
    intake: Intake
    text: JudgeText
    source: str
    every: list[Change] = field(default_factory=list)
    left_out: list[Change] = field(default_factory=list)
    brought: dict[str, ChangeKind] = field(default_factory=dict)
    _budget: CopyBudget = field(default_factory=lambda: CopyBudget(MOST_BYTES, MOST_FILES))
    _seen: dict[str, FileState] = field(default_factory=dict)
    _left: dict[str, FileState] = field(default_factory=dict)

    def begin(self) -> None:
        """Takes the agent's changes."""
        self._seen = file_states(self.agents)
        self.every = changes(self.clean, self.agents)
        self.left_out = self._apply(self.every)
        self._left = file_states(self.clean)

    def take_again(self) -> None:
        """Takes the changes that a helper's program made in the agent's copy, except to files that the judge wrote."""
        seen, now = file_states(self.agents), file_states(self.clean)
        every = seen.keys() | self._seen.keys()
        changed = in_order((path for path in every if seen.get(path) != self._seen.get(path)), str)
        self._seen = seen
        found = [
            Change(path, ChangeKind.MODIFIED if path in seen else ChangeKind.DELETED)
            for path in changed
            if now.get(path) == self._left.get(path)
        ]
        self._apply(found)
        after = file_states(self.clean)
        for change in found:
            self._left.pop(change.path, None)
            if change.path in after:
                self._left[change.path] = after[change.path]

    def _apply(self, found: list[Change]) -> list[Change]:
        left_out = apply_changes(found, self.agents, self.clean, self.intake.brings, self._budget)
        refused = {change.path for change in left_out}
        self.brought |= {change.path: change.kind for change in found if change.path not in refused}
        return left_out

    def expectation(self) -> str:
        """As `changed_beside` returns it, for all changes that came in so far."""
        return changed_beside(self.text, self.source, self.brought, self.intake.start.files)


@dataclass(frozen=True, slots=True)
class JudgesPlace:
    """Where a judge runs. `copy` None: among the agent's own files, or a copy that is taken once (`takes`). `unknown`,
    `only_tools`, `decides`, `tests`, `shares_input`, `follows`: as in `JudgeText`.
    `reference`: as `reference_of` returns it, of the programs that the judge starts. `expectation`: as
    `changed_expectation` does."""

    workspace: Workspace
    agents: Workspace
    copy: JudgesCopy | None = None
    is_clean: bool = False
    unknown: str = ""
    only_tools: bool = False
    decides: bool = True
    tests: str = ""
    shares_input: bool = False
    follows: str = ""
    reference: str = ""
    expectation: str = ""

    def mixed(self, runs: int) -> str:
        """Why the judge, which ran so many programs by the helper, is not apart from the code, or why its own tools
        could obey files of the agent, or have no say; "" if neither."""
        if not runs and (self.is_clean or not self.unknown):
            return NOT_USED
        if self.unknown:
            return UNKNOWN.format(self.unknown)
        if not self.is_clean:
            return NOT_NAMED
        if self.shares_input:
            return SHARES_INPUT
        if self.reference:
            return REFERENCE.format(self.reference)
        if self.tests and self.decides:
            return TESTS.format(self.tests)
        return "" if self.decides else UNDECIDED


async def place_of(
    evidence: Evidence, source: str, takes: Sequence[str] = (), hidden: Sequence[str] = (), *, reads_only: bool = False
) -> tuple[JudgesPlace, dict[str, Any]]:
    """Where the judge with the text `source` runs, and what its reward's detail says about that. `hidden`: files there
    that only the judge writes."""
    agents = evidence.workspace
    if not takes and (reads_only or VARIABLE not in source or not agents.is_sandboxed):
        text = JudgeText.of(source, (), agents, tools_are_known=reads_only)
        known = JudgesPlace(
            agents, agents, unknown=text.unknown * reads_only, only_tools=text.is_read_only, follows=text.follows
        )
        if not known.only_tools or not await in_thread(may_compare, text, source, agents):
            return known, {}
        clean = await evidence.clean_workspace()
        return replace(known, expectation=await in_thread(changed_expectation, text, source, clean, agents, hidden)), {}
    clean = await evidence.clean_workspace()
    start = await in_thread(StartingState.of, clean.folder)
    by_patterns = Intake(start, takes)
    text = JudgeText.of(
        source,
        start.files,
        clean,
        tools_are_known=reads_only,
        is_kept=lambda path: path in start.files and not by_patterns.brings(path),
    )
    copy = JudgesCopy(clean.folder, agents.folder, Intake(start, takes, {*hidden, *text.programs}), text, source)
    await in_thread(copy.begin)
    evidence.seen.add("the agent's changes", await in_thread(listed, copy.every, copy.left_out))
    about = {"changed": len(copy.every), "left_out": [change.path for change in copy.left_out[:NAMED]]}
    other = await in_thread(other_name, text, source, copy.every, clean, hidden) if takes else ""
    other = other or (await in_thread(copy.expectation) if takes else "")
    known = JudgesPlace(clean, agents, None if takes else copy, is_clean=True, unknown=text.unknown, expectation=other)
    known = replace(known, only_tools=text.is_read_only, decides=text.decides, shares_input=text.shares_input)
    return replace(known, tests=text.tests, follows=text.follows, reference=reference_of(text.programs)), about


def listed(every: Iterable[Change], left_out: Iterable[Change]) -> str:
    """The changes, one a line. An agent can make very many: the first and the last `MOST_LINES`."""
    every, dropped = list(every), set(left_out)
    missing = len(every) - 2 * MOST_LINES
    shown = every[:MOST_LINES] + every[-MOST_LINES:] if missing > 0 else every
    lines = [f"{each.kind.value} {each.path}{' (dropped)' if each in dropped else ''}" for each in shown]
    return "\n".join([*lines[:MOST_LINES], f"[{missing:,} more]", *lines[MOST_LINES:]] if missing > 0 else lines)


async def run_program(evidence: Evidence, place: JudgesPlace, step: str, launch: Command) -> ProgramEnd:
    """Runs the judge. Raises `Unreadable` if the code took the judge's time."""
    detail = dict[str, Any]()
    workspace, copy = place.workspace, place.copy
    work = CodeWork(place.agents.folder, copy.take_again) if copy else None
    async with workspace.code_helper(evidence.limits, evidence.deadline, work) as helper:
        settings = {**(SAFE_PATH if place.is_clean or place.only_tools else {}), **launch.env, **helper.env}
        mounts = {**launch.mounts, **helper.mounts}
        try:
            exit_ = await evidence.run(workspace, step, replace(launch, mounts=mounts, env=settings))
        except EvaluatorFailed as failure:
            raise (Unreadable(f"its code took {helper.excess}") if helper.excess else failure) from failure
        excess = helper.excess
        if helper.runs and exit_.excess.endswith(DISK):  # the judge's copy takes the code's files, too
            excess = exit_.excess
    if helper.removed:
        evidence.seen.add("removed from the working copy", "\n".join(helper.removed))
        detail["removed"] = list(helper.removed[:NAMED])
    if expectation := place.expectation or (await in_thread(copy.expectation) if copy else ""):
        detail[UNPROTECTED] = CHANGED.format(expectation)
    elif place.follows:
        detail[UNPROTECTED] = FOLLOWS.format(place.follows)
    elif not place.only_tools and (shared := helper.shared or place.mixed(helper.runs)):
        detail[UNPROTECTED] = shared
    return ProgramEnd(exit_, detail, excess, helper.exits)
