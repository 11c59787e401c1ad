"""Says what a trainer waits for, while the server has too few groups for it."""

from __future__ import annotations

import time
from collections.abc import Callable

from rolltap.counted import counted
from rolltap.trainer_client.client import TrainerClient
from rolltap.types import GroupStatus

PrintLine = Callable[[str], None]

FIRST_S, EVERY_S = 10.0, 60.0
"""Seconds of waiting before the first line, and between two lines."""


class WaitNotice:
    """The lines of one wait, which begins when this is made. `print_line` prints one."""

    def __init__(self, client: TrainerClient, policy: str, print_line: PrintLine) -> None:
        self._client = client
        self._policy = policy
        self._print_line = print_line
        self._due = time.monotonic() + FIRST_S

    def report_wait(self, missing: int) -> None:
        """Says how the policy's groups stand, if a line is due; `missing` are those that the step still needs."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + EVERY_S
        groups = self._client.policy(self._policy).groups
        ready, open_now, stale = (
            groups.get(status, 0) for status in (GroupStatus.COMPLETE, GroupStatus.OPEN, GroupStatus.STALE)
        )
        counts = f"{ready:,} ready, {open_now:,} under way, {stale:,} stale"
        self._print_line(f"waiting for {counted(missing, 'group')} of {self._policy}: {counts}")
