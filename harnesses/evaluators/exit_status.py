"""What an evaluator's exit status says: a verdict on the agent's work, or that the evaluator itself could not run.

Shells reserve the statuses from 126: 126 for a file that can't be executed, 127 for a command that isn't there, and
128 + n for a process that signal n ended (-n where a runtime started it without a shell). None of them is a verdict.
All others are.
"""

from __future__ import annotations

import signal

from rolltap.errors import EvaluatorFailed
from rolltap.harnesses.base import Exit
from rolltap.harnesses.output import last_line

COULD_NOT_RUN = {
    126: "could not run (exit code 126: not executable, a missing interpreter, or not a line that bash can parse)",
    127: "could not run (exit code 127: command not found)",
}
SIGNALLED, LAST_SIGNAL = 128, 64

CLOSED_PIPE = SIGNALLED + signal.SIGPIPE
"""With `pipefail`, the status of a pipeline whose reader had enough. A pipeline's status is that of its last part that
failed, so the reader succeeded."""


def verdict_status(exit_: Exit, what: str) -> int:
    """The exit status of `what`, if it is a verdict. Raises `EvaluatorFailed` if `what` could not run to its end."""
    check_survived(exit_, what)
    if exit_.code in COULD_NOT_RUN:
        raise EvaluatorFailed(f"{what} {COULD_NOT_RUN[exit_.code]}: {last_line(exit_.output)}")
    assert exit_.code is not None
    return 0 if exit_.code == CLOSED_PIPE else exit_.code


def check_survived(exit_: Exit, what: str) -> None:
    """Raises `EvaluatorFailed` if a signal or a limit ended `what`: a reward that it wrote may be a first guess."""
    code = exit_.code
    if exit_.excess:
        raise EvaluatorFailed(f"{what} exceeded a limit: {exit_.excess}")
    if code is None or code < 0 or (SIGNALLED <= code <= SIGNALLED + LAST_SIGNAL and code != CLOSED_PIPE):
        status = "" if code is None else f" (exit code {code})"
        raise EvaluatorFailed(f"{what} was ended by a signal{status}: {last_line(exit_.output)}")
