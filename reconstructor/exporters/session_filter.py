"""`--best`, `--balance` and `--limit`: select among the sessions that `--where` keeps.

A first pass over the record collects a short entry per session (`Eligible`); a second pass writes the selected ones.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Literal, get_args

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import ExportItem

BalanceBy = Literal["", "harness", "task"]


@dataclass(frozen=True, slots=True)
class Eligible:
    """A session that may be selected."""

    session_id: str
    task_id: str
    harness: str
    reward: float | None

    @classmethod
    def of(cls, item: ExportItem) -> Eligible:
        return cls(item.session.id, item.task_id, item.harness, item.reward)


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """In this order: `best` rollouts of each task by reward, as many of each `balance`, `limit` in all. 0: no bound.

    Random choices follow a hash of `seed` and the session's id, so a higher limit keeps the sessions of a lower one.
    """

    best: int = 0
    balance: BalanceBy = ""
    limit: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.balance not in get_args(BalanceBy):
            raise DatasetError(f"--balance: expected harness or task, not {self.balance!r}")
        if self.best < 0 or self.limit < 0:
            raise DatasetError("--best and --limit: expected a number of sessions, 1 or more")

    def __bool__(self) -> bool:
        """True if there is any bound."""
        return bool(self.best or self.balance or self.limit)

    def choose(self, sessions: Iterable[Eligible]) -> frozenset[str]:
        """The ids of the sessions to write."""
        kept = list(sessions)
        if self.best:
            kept = list(chain.from_iterable(map(self._best, _by(kept, "task"))))
        kept.sort(key=self._draw)
        if self.balance:
            classes = _by(kept, self.balance)
            even = min(map(len, classes), default=0)
            turns = zip_longest(*(members[:even] for members in classes))
            kept = [session for turn in turns for session in turn]
        return frozenset(session.session_id for session in (kept[: self.limit] if self.limit else kept))

    def _best(self, sessions: Sequence[Eligible]) -> list[Eligible]:
        """The sessions of one task with the highest rewards; of equal ones, the older. None without a reward."""
        scored = [(session.reward, session) for session in sessions if session.reward is not None]
        scored.sort(key=lambda pair: (-pair[0], pair[1].session_id))
        return [session for _, session in scored[: self.best]]

    def _draw(self, session: Eligible) -> bytes:
        return hashlib.sha256(f"{self.seed}:{session.session_id}".encode()).digest()


def _by(sessions: Iterable[Eligible], name: Literal["harness", "task"]) -> list[list[Eligible]]:
    """The sessions grouped by task or harness, in the order of first appearance."""
    classes: defaultdict[str, list[Eligible]] = defaultdict(list)
    for session in sessions:
        classes[session.task_id if name == "task" else session.harness].append(session)
    return list(classes.values())
