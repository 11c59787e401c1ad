"""The hash chain of a rollout's rewards: each row's hash covers its content and the hash of the row before it.

The rollout stores the hash of its last row. So `rolltap log verify` finds a row that was changed, added, moved or
removed despite the triggers. Somebody who can change rows can also compute a new chain: keep the digest that `verify`
prints, and compare it later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.separation import tenants_on_record
from rolltap.ledger.schema import rewards, rollouts
from rolltap.tenants import acting_for

FIELDS = ("id", "rollout_id", "attempt", "value", "scope", "source", "detail", "created_at", "key_id", "number")
PAGE = 1000


def chained_hash(previous: str, row: Mapping[str, Any]) -> str:
    """SHA-256 of the previous row's hash ("" for the first row) and this row's fields."""
    content = json.dumps([previous, *(row[name] for name in FIELDS)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


@dataclass(slots=True)
class VerifiedRewards:
    """The number of checked rewards, and the problems. `digest` covers the last hashes of all rollouts."""

    rewards: int = 0
    digest: str = ""
    problems: list[str] = field(default_factory=list)


async def verify_rewards(database: Database) -> VerifiedRewards:
    """Checks the reward chains of all tenants."""
    report, digest = VerifiedRewards(), hashlib.sha256()
    if not await database.query(lambda connection: sa.inspect(connection).has_table(rewards.name)):
        return report
    for tenant in await database.query(tenants_on_record):
        with acting_for(tenant):
            await _verify(database, report, digest)
    report.digest = digest.hexdigest()
    return report


async def _verify(database: Database, report: VerifiedRewards, digest: Any) -> None:
    """Checks the chains of the current tenant."""
    last = ""
    while page := await database.query(lambda connection, after=last: _page(connection, after)):
        for rollout_id, head, rows in page:
            report.rewards += len(rows)
            report.problems += _problems(rollout_id, head, rows)
            if head:
                digest.update(f"{rollout_id} {head}\n".encode())
        last = page[-1][0]
    orphans = sa.select(sa.func.count()).where(rewards.c.rollout_id.not_in(sa.select(rollouts.c.id)))
    if count := await database.query(lambda connection: connection.execute(orphans).scalar_one()):
        report.problems.append(f"{count} rewards belong to no rollout")


def _page(connection: sa.Connection, after: str) -> list[tuple[str, str | None, list[sa.Row[Any]]]]:
    """A page of rollouts after `after`, each with its stored hash and its rewards in order."""
    page = sa.select(rollouts.c.id, rollouts.c.reward_head).where(rollouts.c.id > after).order_by(rollouts.c.id)
    heads = {row.id: row.reward_head for row in connection.execute(page.limit(PAGE))}
    if not heads:
        return []
    between = rewards.c.rollout_id.between(min(heads), max(heads))
    reward_rows = connection.execute(sa.select(rewards).where(between).order_by(rewards.c.rollout_id, rewards.c.number))
    by_rollout = {rollout_id: list(rows) for rollout_id, rows in groupby(reward_rows, key=lambda row: row.rollout_id)}
    return [(rollout_id, head, by_rollout.get(rollout_id, [])) for rollout_id, head in sorted(heads.items())]


def _problems(rollout_id: str, head: str | None, rows: list[sa.Row[Any]]) -> Iterator[str]:
    previous = ""
    for number, row in enumerate(rows):
        if row.number != number:
            yield f"rollout {rollout_id}: reward {row.id} is number {row.number}, not {number}"
        if chained_hash(previous, row._asdict()) != row.hash:
            yield f"rollout {rollout_id}: reward {row.id} was changed"
        previous = row.hash
    if previous != (head or ""):
        yield f"rollout {rollout_id}: its last reward is missing, or another was added"
