"""Sums the mismatch between a policy's trainer and engines by group and harness, incrementally.

A run's page reloads every few seconds. Rows never change, and a later lease has a greater token, so new rows usually
have the greatest tokens. `updated_sums` compares the count and tokens of the rows with those of the previous sums. If
only rows with the greatest tokens are new, it sums their groups again, otherwise all groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from rolltap.calllog.schema import annotations

CHUNK = 500


@dataclass(frozen=True, slots=True)
class MismatchSums:
    """Sums over the latest annotations of calls: see `AnnotationLine`."""

    calls: int = 0
    compared: int = 0
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    fresh: int = 0
    fresh_sum: float = 0.0
    kept: int = 0
    clipped: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    """A fingerprint of a set of rows: equal values mean equal rows."""

    count: int = 0
    last_token: int = 0
    token_sum: int = 0


@dataclass(frozen=True, slots=True)
class GroupSums:
    """The sums of a group and harness, and the greatest token of its rows."""

    last_token: int
    sums: MismatchSums


@dataclass(frozen=True, slots=True)
class PolicySums:
    """A policy's sums by group id, by harness (sorted by name), and by both.

    `older` is the fingerprint of the rows whose token is less than the greatest one.
    """

    rows: _Rows
    older: _Rows
    by_both: Mapping[tuple[str, str], GroupSums]
    by_group: Mapping[str, MismatchSums]
    by_harness: Mapping[str, MismatchSums]


NO_SUMS = PolicySums(_Rows(), _Rows(), {}, {}, {})


def updated_sums(connection: sa.Connection, policy: str, known: PolicySums = NO_SUMS) -> PolicySums:
    """The policy's current sums. `known` are its previous sums."""
    columns = annotations.c
    mine, last = columns.policy == policy, known.rows.last_token
    now = _policy_rows(connection, mine)
    if now == known.rows:
        return known
    some: set[str] | None = None
    if known.by_both and _policy_rows(connection, mine, columns.token < last) == known.older:
        newer = sa.select(columns.group_id).where(mine, columns.token >= last).distinct()
        some = {*connection.scalars(newer), *(key[0] for key, one in known.by_both.items() if one.last_token == last)}
    if some is None or len(some) > CHUNK:
        by_both = _group_sums(connection, policy, None)
    else:
        unchanged = {key: one for key, one in known.by_both.items() if key[0] not in some}
        by_both = unchanged | _group_sums(connection, policy, some)
    older = _policy_rows(connection, mine, columns.token < now.last_token)
    return PolicySums(now, older, by_both, _by(by_both, 0), _by(by_both, 1))


def _policy_rows(connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> _Rows:
    token = annotations.c.token
    query = sa.select(sa.func.count(), sa.func.max(token), sa.func.sum(token)).where(*conditions)
    return _Rows(*(int(value or 0) for value in connection.execute(query).one()))


def _group_sums(
    connection: sa.Connection, policy: str, group_ids: Iterable[str] | None
) -> dict[tuple[str, str], GroupSums]:
    """The sums of the policy's groups, or only of `group_ids`."""
    columns = annotations.c
    last = sa.select(columns.group_id, columns.harness, sa.func.max(columns.token)).where(columns.policy == policy)
    if group_ids is not None:
        last = last.where(columns.group_id.in_(list(group_ids)))
    rows = connection.execute(last.group_by(columns.group_id, columns.harness))
    sums = _sums(connection, policy, group_ids)
    return {(row[0], row[1]): GroupSums(row[2], sums[row[0], row[1]]) for row in rows}


def _sums(
    connection: sa.Connection, policy: str, group_ids: Iterable[str] | None
) -> dict[tuple[str, str], MismatchSums]:
    """The sums of the policy's groups, or only of `group_ids`. Only the latest annotation of a call counts."""
    columns, newer = annotations.c, annotations.alias()
    replaced = sa.exists().where(newer.c.call_id == columns.call_id, newer.c.token > columns.token)
    query = sa.select(
        columns.group_id,
        columns.harness,
        sa.func.count(),
        sa.func.sum(columns.compared),
        sa.func.sum(columns.mismatch_sum),
        sa.func.max(columns.mismatch_max),
        sa.func.sum(columns.fresh),
        sa.func.sum(columns.fresh_sum),
        sa.func.sum(columns.kept),
        sa.func.sum(columns.clipped),
    )
    query = query.where(columns.policy == policy, ~replaced).group_by(columns.group_id, columns.harness)
    if group_ids is not None:
        query = query.where(columns.group_id.in_(list(group_ids)))
    return {(row[0], row[1]): MismatchSums(*row[2:]) for row in connection.execute(query)}


def _by(sums: Mapping[tuple[str, str], GroupSums], part: int) -> dict[str, MismatchSums]:
    totals: dict[str, MismatchSums] = {}
    for key in sorted(sums, key=lambda key: key[part]):
        name, one = key[part], sums[key].sums
        totals[name] = _total(totals[name], one) if name in totals else one
    return totals


def _total(one: MismatchSums, other: MismatchSums) -> MismatchSums:
    return MismatchSums(
        one.calls + other.calls,
        one.compared + other.compared,
        one.mismatch_sum + other.mismatch_sum,
        max(one.mismatch_max, other.mismatch_max),
        one.fresh + other.fresh,
        one.fresh_sum + other.fresh_sum,
        one.kept + other.kept,
        one.clipped + other.clipped,
    )
