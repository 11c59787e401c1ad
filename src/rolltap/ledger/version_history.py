"""The history of a policy's version numbers, and the staleness of versions.

A number stands for one set of weights forever, and numbers only grow. A trainer that restores an older checkpoint
abandons the later versions, and its weights continue with the next free number. Example: after 6 to 8 are abandoned, 9
stands for the weights of 5. A token of 5 is as fresh as one of 9; a token of 7 comes from abandoned weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.ledger.schema import abandoned, groups
from rolltap.ledger.unit_of_work import Tx


@dataclass(frozen=True, slots=True)
class VersionHistory:
    """A policy's `version`, and its abandoned spans (first, last) in order. The number after a span stands for the
    weights of the version before it."""

    version: int
    abandoned: tuple[tuple[int, int], ...] = ()

    def behind(self, version: int) -> int:
        """The number of updates between the weights of `version` and the current ones."""
        for first, last in self.abandoned:
            if first <= version <= last:
                return version - first + 1 + self.behind(first - 1)
        skipped = sum(last - first + 2 for first, last in self.abandoned if first > version)
        return max(0, self._newest - version - skipped)

    def oldest(self, behind: int) -> int:
        """The lowest version that is at most `behind` updates behind, ignoring abandoned ones."""
        version = self._newest - behind
        for first, last in reversed(self.abandoned):
            if version > last + 1:
                break
            version -= last - first + 2
        return version

    def meets_abandoned(self, oldest: int, newest: int) -> bool:
        """Whether a version from `oldest` to `newest` is abandoned."""
        return any(oldest <= last and first <= newest for first, last in self.abandoned)

    def is_fresh(self, version: int, max_staleness: int) -> bool:
        """Whether `version` is at most `max_staleness` updates behind, and not abandoned."""
        return not self.meets_abandoned(version, version) and self.behind(version) <= max_staleness

    @property
    def _newest(self) -> int:
        """The served version, or the number with which restored weights will be pushed."""
        return max(self.version, self.abandoned[-1][1] + 1) if self.abandoned else self.version


def history_of(tx: Tx, policy: Any) -> VersionHistory:
    """The history of the policy with the row `policy`.

    Only rewinds on the current weights' history count: a later rewind may have undone an earlier one.
    """
    spans = sa.select(abandoned.c.first, abandoned.c.last).where(abandoned.c.policy == policy.name)
    effective: list[tuple[int, int]] = []
    for row in tx.all(spans.order_by(abandoned.c.last.desc())):
        if not effective or row.last < effective[-1][0] - 1:
            effective.append((row.first, row.last))
    return VersionHistory(policy.version, tuple(reversed(effective)))


def fresh(history: VersionHistory, max_staleness: int) -> sa.ColumnElement[bool]:
    """The condition for groups without a trained token that is staler or of an abandoned version.

    Only a group's oldest and newest version are known. So a group counts as sampled from every version between them.
    """
    floor = history.oldest(max_staleness)
    own = [
        sa.or_(groups.c.oldest_version > last, groups.c.newest_version < first)
        for first, last in history.abandoned
        if last >= floor
    ]
    return sa.and_(groups.c.oldest_version >= floor, *own)


def partly_fresh(history: VersionHistory, max_staleness: int) -> sa.ColumnElement[bool]:
    """The condition for groups that may have a fresh trained token."""
    floor = history.oldest(max_staleness)
    abandoned_only = [
        sa.and_(groups.c.oldest_version >= first, groups.c.newest_version <= last) for first, last in history.abandoned
    ]
    return sa.and_(groups.c.newest_version >= floor, *map(sa.not_, abandoned_only))
