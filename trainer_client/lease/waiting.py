"""Reports what the trainer waits for and what was dropped, and ends a run in which no model answers."""

from __future__ import annotations

import time
from collections.abc import Callable

from rolltap.contract.control import PolicyStatus
from rolltap.errors import TrainerError
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.types import GroupStatus, RolloutStatus
from rolltap.wording import counted

PrintLine = Callable[[str], None]

FIRST_S, EVERY_S = 10.0, 60.0
"""Seconds of waiting before the first line, and between two lines."""


class WaitNotice:
    """Reports about one wait, which begins when this is constructed. `print_line` prints a line.

    If the engines do not hold the policy's weights, nothing that they sample can be trained: then `push` is called.
    """

    def __init__(
        self, client: TrainerClient, policy: str, print_line: PrintLine, push: Callable[[], None] = lambda: None
    ) -> None:
        self._push = push
        self._client = client
        self._policy = policy
        self._print_line = print_line
        self._due = time.monotonic() + FIRST_S

    def report_wait(self, missing: int) -> None:
        """Prints the counts of the policy's groups, if a line is due; the step still needs `missing` groups."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        status = self._client.policy(self._policy)
        if status.weights:
            self._print_line(f"pushing the weights of {self._policy} again: {status.weights}")
            self._push()
        groups = status.groups
        ready, open_now, stale = (
            groups.get(status, 0) for status in (GroupStatus.COMPLETE, GroupStatus.OPEN, GroupStatus.STALE)
        )
        counts = f"{ready:,} ready, {open_now:,} under way, {stale:,} stale"
        self._print_line(f"waiting for {counted(missing, 'group')} of {self._policy}: {counts}")


LEAST_ENDED = 8
"""Rollouts that must have ended before a run is ended because no model answers."""


class AnswerWatch:
    """Counts the groups without loss and the rollouts without an answer that the server drops after `begin`."""

    def __init__(self, client: TrainerClient, policy: str, print_line: PrintLine) -> None:
        self._client = client
        self._policy = policy
        self._print_line = print_line
        self._began = self._last = (0, 0, 0)

    def begin(self, status: PolicyStatus) -> None:
        self._began = self._last = _counts(status)

    def check(self) -> None:
        """Prints what was dropped since the last check. `TrainerError` if most rollouts ended without an answer."""
        ended, unanswered, untrained = counts = _counts(self._client.policy(self._policy))
        _, last_unanswered, last_untrained = self._last
        self._last = counts
        if (new := untrained - last_untrained) > 0:
            self._print_line(f"{counted(new, 'group')} of {self._policy} dropped: no reply in them carries loss")
        if (new := unanswered - last_unanswered) > 0:
            self._print_line(f"{counted(new, 'rollout')} of {self._policy} without a model's answer: not trained")
        ended, unanswered = ended - self._began[0], unanswered - self._began[1]
        if ended >= LEAST_ENDED and 2 * unanswered > ended:
            raise TrainerError(
                f"no model answered in {unanswered} of the {ended} rollouts of {self._policy} that ended since this "
                "run began: look at one's reason (rolltap rollout ID); a harness that exits without a call has no "
                "network, another model URL, or a broken image"
            )

    def since_start(self) -> dict[str, int]:
        """The counts since the run began, by the names of `StepReport`."""
        return {
            "groups_dropped": self._last[2] - self._began[2],
            "rollouts_unanswered": self._last[1] - self._began[1],
        }


def _counts(status: PolicyStatus) -> tuple[int, int, int]:
    """All-time counts: rollouts that ended, rollouts without an answer, groups without loss."""
    ended = sum(count for name, count in status.rollouts.items() if RolloutStatus(name).terminal)
    return ended, status.unanswered, status.untrained
