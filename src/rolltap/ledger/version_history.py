"""Which weights a policy's version numbers name, and how many updates they are behind the current ones.

A number names one set of weights for ever, and numbers only grow. A trainer that restores an older checkpoint abandons
the later versions, and its weights continue under the next free number. Example: after 6 to 8 are abandoned, 9 names
the weights of 5 again. A token of 5 is as fresh as one of 9; one of 7 comes from weights that the trainer gave up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from rolltap.ledger.schema import abandoned, groups
from rolltap.ledger.unit_of_work import Tx


@dataclass(frozen=True, slots=True)
class VersionHistory:
    """A policy's `version`, and the spans of abandoned ones (first, last), in order; each is followed by a number that
    stands for the version before it."""

    version: int
    abandoned: tuple[tuple[int, int], ...] = ()

    def behind(self, version: int) -> int:
        """How many updates lie between the weights of `version` and those of now."""
        for first, last in self.abandoned:
            if first <= version <= last:
                return version - first + 1 + self.behind(first - 1)
        skipped = sum(last - first + 2 for first, last in self.abandoned if first > version)
        return max(0, self._newest - version - skipped)

    def oldest(self, behind: int) -> int:
        """The lowest version at most `behind` updates from now, if it is not abandoned."""
        version = self._newest - behind
        for first, last in reversed(self.abandoned):
            if version > last + 1:
                break
            version -= last - first + 2
        return version

    def is_fresh(self, version: int, max_staleness: int) -> bool:
        """Whether a token of `version` is at most so many updates behind, and not of abandoned weights."""
        given_up = any(first <= version <= last for first, last in self.abandoned)
        return not given_up and self.behind(version) <= max_staleness

    @property
    def _newest(self) -> int:
        """The served version, or the one that restored weights are about to be pushed as."""
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
    """Whether a group has no trained token that is staler, or of abandoned weights.

    Only the oldest and newest version of a group are known: one that spans an abandoned version counts as sampled from
    it. Groups without a trained token are of no age.
    """
    floor = history.oldest(max_staleness)
    own = [
        sa.or_(groups.c.oldest_version > last, groups.c.newest_version < first)
        for first, last in history.abandoned
        if last >= floor
    ]
    return sa.or_(groups.c.oldest_version < 0, sa.and_(groups.c.oldest_version >= floor, *own))


def partly_fresh(history: VersionHistory, max_staleness: int) -> sa.ColumnElement[bool]:
    """Whether a group may have a trained token that is fresh enough: its newest is, or an older one may be."""
    floor = history.oldest(max_staleness)
    given_up = [
        sa.and_(groups.c.oldest_version >= first, groups.c.newest_version <= last) for first, last in history.abandoned
    ]
    return sa.or_(groups.c.oldest_version < 0, sa.and_(groups.c.newest_version >= floor, *map(sa.not_, given_up)))
