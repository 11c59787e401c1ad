"""What the ledger's tests stand on: databases, a clock to turn, and sessions whose trajectories are made up."""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import numpy as np
import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.calllog.schema import guards
from rolltap.contract.admin import LATE, NOTHING_SAMPLED, FinishRollout, GroupRule, NewReward
from rolltap.contract.trainer import Lease, LeaseRequest
from rolltap.errors import NotFound, RecordCorrupt, RecordTooLarge, StoreUnavailable
from rolltap.ids import new_id
from rolltap.ledger.counts import counted
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.ledger import Ledger
from rolltap.ledger.rebuilding import LocalRebuilder
from rolltap.ledger.schema import (
    NOTHING_TO_TRAIN,
    audit,
    groups,
    metadata,
    policies,
    pruned_groups,
    reward_guards,
    rewards,
    rollout_policies,
    rollouts,
    submissions,
    submitted,
)
from rolltap.ledger.unit_of_work import LedgerSettings, Tx
from rolltap.ledger.views import all_groups
from rolltap.types import NO_VERSION, CallSpan, Group, GroupStatus, Rollout, RolloutStatus, Segment, Task, Trajectory

KINDS = ("sqlite", "postgresql")


@asynccontextmanager
async def database_url(kind: str, folder: Path, server: str) -> AsyncIterator[str]:
    """The URL of a fresh, empty database, which is removed at the end. `server`: Postgres' maintenance database."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'ledger.db'}"
        return
    name = f"rolltap_test_{secrets.token_hex(6)}"
    await _on_server(server, f'CREATE DATABASE "{name}"')
    try:
        yield f"{server.rsplit('/', 1)[0]}/{name}"
    finally:
        await _on_server(server, f'DROP DATABASE "{name}" WITH (FORCE)')


async def _on_server(server: str, statement: str) -> None:
    connection = await asyncpg.connect(server)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def removals(table: str, dialect: str) -> list[str]:
    """The statements that drop an append-only table's triggers."""
    if dialect == "sqlite":
        return [f"DROP TRIGGER {table}_no_update", f"DROP TRIGGER {table}_no_delete"]
    return [f"DROP TRIGGER {table}_no_change ON {table}", f"DROP TRIGGER {table}_no_truncate ON {table}"]


async def empty(database: Database) -> None:
    """Deletes every row, so that a database can be used again."""

    def work(connection: sa.Connection) -> None:
        dialect = connection.dialect.name
        for table in (rewards.name, audit.name, pruned_groups.name):
            for statement in removals(table, dialect):
                connection.exec_driver_sql(statement)
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
        again = [reward_guards(dialect), *(guards(table.name, dialect) for table in (audit, pruned_groups))]
        for statement in (each for statements in again for each in statements):
            connection.exec_driver_sql(statement)

    await database.transact(work)


class Clock:
    """The database's clock, as the test turns it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self, connection: sa.Connection) -> float:
        return time.time() + self.ahead


class StillClock(Clock):
    """A clock that only moves when the test turns it."""

    def __call__(self, connection: sa.Connection) -> float:
        return 1_700_000_000.0 + self.ahead


def trajectory(session_id: str, versions: tuple[int, ...], prompt: int = 3) -> Trajectory:
    """One segment: `prompt` tokens of context, then one trained token of each of `versions`."""
    length = prompt + len(versions)
    mask = np.arange(length) >= prompt
    logprobs = np.where(mask, -0.5, 0.0).astype(np.float32)
    spans = np.concatenate([np.full(prompt, NO_VERSION), versions]).astype(np.int32)
    call = f"call-{session_id}"
    calls = (CallSpan(call, prompt, length, trained=True, index=0),)
    segment = Segment(np.arange(length, dtype=np.int32), mask, logprobs, spans, calls)
    return Trajectory(session_id, (segment,), (), {"calls": 1, "answers": int(bool(versions))})


def counted_anew(tx: Tx, policy: str) -> dict[str, dict[str, int]]:
    """What `rolltap.ledger.counts.counted` returns, counted from all groups, rollouts and queued tasks."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    own = tx.all(sa.select(groups).where(groups.c.policy == policy))
    for group in own:
        found["groups"][group.status] += 1
        if group.status == GroupStatus.COMPLETE and group.oldest_version >= 0:
            found["ready"][f"{group.oldest_version} {group.newest_version}"] += 1
        found["zero_variance"][""] += bool(group.zero_variance)
        found["untrained"][""] += group.status == GroupStatus.DROPPED and group.reason == NOTHING_TO_TRAIN
    without = sa.select(rollout_policies.c.rollout_id).where(
        rollout_policies.c.policy == policy, rollout_policies.c.sampled.is_(False)
    )
    played_without = {row.rollout_id for row in tx.all(without)}
    owners = {group.shares or group.id for group in own}
    for rollout in tx.all(sa.select(rollouts)):
        if rollout.group_id in owners:
            found["rollouts"][rollout.status] += 1
            says_so = rollout.reason.removeprefix(f"{LATE}; ").startswith(NOTHING_SAMPLED)
            ended = rollout.finished_at is not None
            found["unanswered"][""] += ended and (says_so or rollout.id in played_without)
    waiting = sa.select(sa.func.count()).select_from(submitted.join(submissions)).where(submissions.c.policy == policy)
    waiting = waiting.where(submitted.c.group_id.is_(None), submissions.c.cancelled_at.is_(None))
    found["queued"][""] = tx.scalar(waiting)
    return {kind: counts for kind, by_state in found.items() if (counts := {s: n for s, n in by_state.items() if n})}


def _of_policy(session_id: str, played: Mapping[str, tuple[int, ...]], policy: str) -> Trajectory:
    """A segment for each policy; only those of `policy` carry loss."""
    segments = []
    for name, versions in played.items():
        (segment,) = trajectory(f"{session_id}-{name}", versions).segments
        if name != policy:
            (span,) = segment.turns
            segment = replace(
                segment,
                loss_mask=np.zeros(len(segment), bool),
                logprobs=np.zeros(len(segment), np.float32),
                versions=np.full(len(segment), NO_VERSION, np.int32),
                turns=(replace(span, trained=False),),
            )
        segments.append(segment)
    return Trajectory(session_id, tuple(segments), (), {"answers": int(bool(played.get(policy)))})


class World:
    """A ledger over a database, with sessions that sample one token of the policy's version each."""

    def __init__(self, database: Database, *, clock: Clock | None = None, **settings: Any) -> None:
        self.database = database
        self.clock = clock or Clock()
        self.versions: dict[str, tuple[int, ...]] = {}
        self.played: dict[str, dict[str, tuple[int, ...]]] = {}  # by policy, of sessions that train several
        self.closed: set[str] = set()
        self.corrupt: set[str] = set()
        self.too_large: set[str] = set()
        self.pruned: set[str] = set()
        self.late: set[str] = set()  # sessions with a call that completed after their rollout ended
        self.unreadable = 0  # how many of the next reads fail
        self.unstored: set[str] = set()  # sessions whose server died before it could store them
        self.ledger = Ledger(
            database,
            rebuilder=LocalRebuilder(database, self.trajectories),
            close_session=self.close_session,
            settings=LedgerSettings(**{"poll": 0.05, **settings}),
            clock=self.clock,
        )

    async def trajectories(self, session_ids: Sequence[str], policy: str = "", /) -> list[Trajectory]:
        if self.unreadable:
            self.unreadable -= 1
            raise StoreUnavailable("the record was not read in time")
        for session_id in self.corrupt.intersection(session_ids):
            raise RecordCorrupt(f"session {session_id} has a row that fails its checks")
        for session_id in self.too_large.intersection(session_ids):
            raise RecordTooLarge(f"session {session_id} has too many tokens")
        return [self._trajectory(session_id, policy) for session_id in session_ids]

    def _trajectory(self, session_id: str, policy: str) -> Trajectory:
        if session_id in self.pruned:
            return Trajectory(session_id, (), (), {})
        if (played := self.played.get(session_id)) is not None:
            return _of_policy(session_id, played, policy)
        recorded = trajectory(session_id, self.versions.get(session_id, ()))
        if session_id not in self.late:
            return recorded
        late = trajectory(f"{session_id}-late", (9,)).segments
        return replace(recorded, segments=(*recorded.segments, *late))

    async def close_session(self, session_id: str) -> None:
        if session_id in self.unstored:
            raise NotFound(f"no session {session_id!r}")
        self.closed.add(session_id)

    async def groups(self) -> list[Group]:
        return [group async for group, _ in all_groups(self.database)]

    async def check_counts(self) -> None:
        """The kept counts of every policy are those of its groups and rollouts."""

        def work(connection: sa.Connection) -> None:
            tx = Tx(connection, 0.0)
            for (name,) in tx.all(sa.select(policies.c.name)):
                assert dict(counted(tx, name)) == counted_anew(tx, name), name

        await self.database.query(work)

    async def open(self, n: int = 2, *, policy: str = "policy", tags: tuple[str, ...] = (), **rule: Any) -> Group:
        task = Task(f"task-{new_id()}", "list the files", {"files": {"a": "b"}}, ("easy",))
        return await self.ledger.groups.open(GroupSpec(policy, n, task, tags, rule=GroupRule(**rule)))

    async def play(self, rollout: Rollout, **versions: tuple[int, ...]) -> Rollout:
        """Starts a rollout in which each policy samples one token of each of its versions."""
        session = new_id()
        self.played[session] = versions
        return (await self.ledger.rollouts.start(rollout.id, session)).rollout

    async def start(self, rollout: Rollout, *versions: int) -> Rollout:
        session = new_id()
        self.versions[session] = versions or (0,)
        return (await self.ledger.rollouts.start(rollout.id, session)).rollout

    async def finish(self, rollout: Rollout, reward: float | None = 1.0, **ending: Any) -> Rollout:
        """Rewards and finishes a started rollout."""
        if reward is not None:
            await self.ledger.rewards.append(NewReward(rollout.id, reward))
        status = ending.pop("status", RolloutStatus.SUCCEEDED)
        return await self.ledger.rollouts.finish(rollout.id, FinishRollout(status, rollout.attempt, **ending))

    async def complete(self, n: int = 2, *versions: int, policy: str = "policy", **rule: Any) -> Group:
        """A group whose rollouts have all succeeded, with rewards 0, 1, 0, ..."""
        group = await self.open(n, policy=policy, **rule)
        for number, rollout in enumerate(group.rollouts):
            await self.finish(await self.start(rollout, *versions), float(number % 2))
        return await self.ledger.groups.get(group.id)


def wants(groups: int = 1, **more: object) -> LeaseRequest:
    return LeaseRequest("trainer", "policy", groups, **more)  # type: ignore[arg-type]


def key(lease: Lease, incarnation: int = 0) -> LeaseKey:
    """What a call about the lease shows."""
    return LeaseKey(lease.id, lease.token, incarnation)


async def status(world: World, group_id: str) -> GroupStatus:
    return (await world.ledger.groups.get(group_id)).status
