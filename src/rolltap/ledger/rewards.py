"""Rewards: appended facts in a hash chain. A reward belongs to the rollout's attempt at that time.

An attempt has at most one reward of each scope. The first one counts, and a second one is refused, so nobody can change
a score later. To score again, run the rollout again.

Each row's hash covers its content and the hash of the rollout's row before it, and the rollout stores the hash of its
last row. So `rolltap log verify` finds a row that was changed, added, moved or removed despite the triggers. Somebody
who can change rows can also compute a new chain: keep the digest that `verify` prints, and compare it later. It
stays the same when groups are pruned: the digest of each one's rewards is kept (`rolltap.ledger.pruning`).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.schema import tenants_on_record
from rolltap.contract.admin import NewReward
from rolltap.contract.keys import SERVER, Caller
from rolltap.errors import LedgerError
from rolltap.ids import new_id
from rolltap.ledger.groups import settle
from rolltap.ledger.rollouts import check_own
from rolltap.ledger.rows import locked_group, reward_of
from rolltap.ledger.schema import groups, pruned_groups, rewards, rollouts
from rolltap.ledger.unit_of_work import Tx, UnitOfWork
from rolltap.tenants import acting_for
from rolltap.types import Reward, RolloutStatus

NEWEST = rewards.c.number.desc()


class Rewards:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def append(self, reward: NewReward, by: Caller = SERVER) -> Reward:
        """Appends a reward. The same `id` with the same content has no effect; with another content it is refused.

        The rollout may have ended. The reward may complete its group. A reward for an earlier attempt is refused.
        """
        id = reward.id or new_id()

        def work(tx: Tx) -> Reward:
            rollout, group = locked_group(tx, reward.rollout_id)
            check_own(tx, rollout.id, by)
            known = tx.first(sa.select(rewards).where(rewards.c.id == id))
            if known is not None:
                _check_same(known, reward, rollout.attempt if reward.attempt is None else reward.attempt)
                return reward_of(known)
            if reward.attempt is not None and reward.attempt != rollout.attempt:
                raise LedgerError(
                    f"rollout {rollout.id} is at attempt {rollout.attempt}; a reward for attempt {reward.attempt} "
                    "comes too late",
                    param="attempt",
                )
            if rollout.attempt and rollout.session_id is None and rollout.status == RolloutStatus.PENDING:
                raise LedgerError(
                    f"rollout {rollout.id} waits for attempt {rollout.attempt} to begin; it cannot be scored yet",
                    param="attempt",
                )
            _check_first(tx, rollout, reward.scope)
            last = tx.first(sa.select(rewards).where(rewards.c.rollout_id == rollout.id).order_by(NEWEST).limit(1))
            values = {
                "id": id,
                "rollout_id": rollout.id,
                "attempt": rollout.attempt,
                "value": float(reward.value) + 0.0,  # the form that the database returns: a float, and no -0.0
                "scope": reward.scope,
                "source": reward.source,
                "detail": json.loads(json.dumps(dict(reward.detail))),
                "created_at": tx.now,
                "key_id": by.id,
                "number": 0 if last is None else last.number + 1,
            }
            values["hash"] = chained_hash("" if last is None else last.hash, values)
            if not tx.insert_new(rewards, values):
                raise LedgerError(f"reward {id} is on record for another rollout; use a new id", param="id")
            tx.run(sa.update(rollouts).where(rollouts.c.id == rollout.id).values(reward_head=values["hash"]))
            tx.note("reward", rollout.id, group_id=group.id, scope=reward.scope, value=reward.value, key_id=by.id)
            settle(tx, group, self._uow.settings)
            return reward_of(SimpleNamespace(**values))

        return await self._uow.transact(work)

    async def of(self, rollout_id: str) -> Sequence[Reward]:
        """All rewards of the rollout, including those of earlier attempts, in order."""
        statement = sa.select(rewards).where(rewards.c.rollout_id == rollout_id)
        ordered = statement.order_by(rewards.c.number)
        return await self._uow.query(lambda tx: [reward_of(row) for row in tx.all(ordered)])


def _check_first(tx: Tx, rollout: Any, scope: str) -> None:
    of_scope = sa.and_(rewards.c.attempt == rollout.attempt, rewards.c.scope == scope)
    first = tx.first(sa.select(rewards).where(rewards.c.rollout_id == rollout.id, of_scope))
    if first is not None:
        raise LedgerError(
            f"rollout {rollout.id}, attempt {rollout.attempt} already has a reward of scope {scope}: {first.id} by "
            f"{first.source or 'no source'}, key {first.key_id or 'unknown'}; an attempt is scored once",
            param="scope",
        )


def _check_same(known: Any, reward: NewReward, attempt: int) -> None:
    if known.rollout_id == reward.rollout_id and known.attempt != attempt:
        raise LedgerError(
            f"reward {known.id} is on record for attempt {known.attempt}, and this is attempt {attempt}: use a new id "
            "for each attempt",
            param="id",
        )
    if (known.rollout_id, known.value, known.scope) != (reward.rollout_id, reward.value, reward.scope):
        raise LedgerError(f"reward {known.id} is on record with another value or scope; use a new id", param="id")


FIELDS = ("id", "rollout_id", "attempt", "value", "scope", "source", "detail", "created_at", "key_id", "number")
PAGE = 200


def chained_hash(previous: str, row: Mapping[str, Any]) -> str:
    """SHA-256 of the previous row's hash ("" for the first row) and this row's fields."""
    content = json.dumps([previous, *(row[name] for name in FIELDS)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def rewards_digest(heads: Iterable[tuple[str, str]]) -> str | None:
    """SHA-256 of the last hashes of a group's rollouts, given by rollout id; None without any."""
    lines = [f"{rollout_id} {head}\n" for rollout_id, head in sorted(heads)]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else None


@dataclass(slots=True)
class VerifiedRewards:
    """The number of checked rewards, those of pruned groups, and the problems. `digest` covers the digests of all
    groups, pruned ones too."""

    rewards: int = 0
    pruned: int = 0
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
        for group in page:
            report.rewards += sum(len(rows) for _, _, rows in group.rollouts)
            for rollout in group.rollouts:
                report.problems += _problems(*rollout)
            own = rewards_digest((rollout_id, head) for rollout_id, head, _ in group.rollouts if head)
            if group.pruned is not None:
                report.pruned += group.pruned.rewards
                if group.is_there:
                    report.problems.append(f"group {group.id} was pruned, but is on record")
            if kept := own or (group.pruned and group.pruned.digest):
                digest.update(f"{group.id} {kept}\n".encode())
        last = page[-1].id
    in_groups = sa.select(rollouts.c.id).join(groups, groups.c.id == rollouts.c.group_id)
    orphans = sa.select(sa.func.count()).where(rewards.c.rollout_id.not_in(in_groups))
    if count := await database.query(lambda connection: connection.execute(orphans).scalar_one()):
        report.problems.append(f"{count} rewards belong to no rollout")


@dataclass(slots=True)
class _GroupRewards:
    """A group's rollouts, each with its stored hash and its rewards in order; and its row if it was pruned."""

    id: str
    is_there: bool
    pruned: sa.Row[Any] | None
    rollouts: list[tuple[str, str | None, list[sa.Row[Any]]]] = field(default_factory=list)


def _page(connection: sa.Connection, after: str) -> list[_GroupRewards]:
    """A page of the groups after `after` that have rollouts or were pruned."""
    living = sa.select(groups.c.id).where(groups.c.shares.is_(None), groups.c.id > after).order_by(groups.c.id)
    gone = (
        sa.select(pruned_groups.c.group_id).where(pruned_groups.c.group_id > after).order_by(pruned_groups.c.group_id)
    )
    either = sa.union(*(sa.select(each.limit(PAGE).subquery()) for each in (living, gone))).subquery()
    ids = list(connection.scalars(sa.select(either.c.id).order_by(either.c.id).limit(PAGE)))  # in the database's order
    there = set(connection.scalars(sa.select(groups.c.id).where(groups.c.id.in_(ids))))
    rows_of_gone = connection.execute(sa.select(pruned_groups).where(pruned_groups.c.group_id.in_(ids)))
    pruned = {row.group_id: row for row in rows_of_gone}
    page = {id: _GroupRewards(id, id in there, pruned.get(id)) for id in ids}
    own = rollouts.c.group_id.in_(ids)
    reward_rows = sa.select(rewards).join(rollouts, rollouts.c.id == rewards.c.rollout_id).where(own)
    by_rollout: defaultdict[str, list[sa.Row[Any]]] = defaultdict(list)
    for row in connection.execute(reward_rows.order_by(rewards.c.rollout_id, rewards.c.number)):
        by_rollout[row.rollout_id].append(row)
    heads = sa.select(rollouts.c.id, rollouts.c.group_id, rollouts.c.reward_head).where(own).order_by(rollouts.c.id)
    for row in connection.execute(heads):
        page[row.group_id].rollouts.append((row.id, row.reward_head, by_rollout[row.id]))
    return list(page.values())


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
