"""The counts of policies that the database keeps are those of its groups and rollouts, whatever happens in whatever
order, on every database."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rolltap.calllog.schema import guards
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.contract.admin import LATE, NOTHING_SAMPLED, ClaimRollouts, FinishRollout, GroupRule, NewReward
from rolltap.contract.trainer import LeaseRequest, Rewind
from rolltap.errors import RolltapError
from rolltap.ids import new_id
from rolltap.ledger import counts
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.schema import policy_counts, pruned_groups
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import Cause, Group, Rollout, RolloutStatus, Scoring, Task

from ..unit.ledger.world import KINDS, StillClock, World, database_url, empty, removals
from .ledger_trainers import Runner

POLICIES = ("a", "b")
ENDED = tuple(status for status in RolloutStatus if status.terminal)
REASONS = ("", "stopped", NOTHING_SAMPLED, f"{LATE}; {NOTHING_SAMPLED}")
TTL = 60.0


class Users:
    """Do with the ledger what comes to their minds. What it refuses, it refuses."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = Random(seed)
        self.incarnations = {"trainer": 0, "other": 0}
        self.leases: list[LeaseKey] = []
        self.submissions: list[str] = []

    async def act(self) -> None:
        names = [name for name in dir(self) if name.startswith("they_")]
        with suppress(RolltapError):
            await getattr(self, self.random.choice(names))()

    async def group(self) -> Group:
        while not (groups := await self.world.groups()):
            await self.they_open()
        return self.random.choice(groups)

    async def rollout(self) -> Rollout:
        return self.random.choice((await self.group()).rollouts)

    def rule(self) -> dict[str, Any]:
        choose = self.random.choice
        usable = choose((None, 1, 2))
        return {
            "usable": usable,
            "spares": choose((0, 2)) if usable else 0,
            "deadline": choose((None, TTL)),
            "late": choose(("drop", "partial")),
            "zero_variance": choose(("keep", "drop", "replace")),
        }

    def sampled(self) -> dict[str, tuple[int, ...]]:
        return {policy: self.random.choice(((), (0,), (0, 1))) for policy in POLICIES}

    async def they_open(self) -> None:
        tags = self.random.choice(((), ("purpose=evaluation",)))
        also = self.random.choice(((), ("b",)))
        roles = {"first": "a", "second": "b"} if also else {}
        task = Task(new_id(), "do it")
        spec = GroupSpec("a", 2, task, tags, GroupRule(**self.rule()), roles=roles, also=also)
        await self.world.ledger.groups.open(spec)

    async def they_submit(self) -> None:
        tasks = tuple(Task(new_id(), "do it") for _ in range(2))
        spec = SubmissionSpec(self.random.choice(POLICIES), 2, tasks, rule=GroupRule(**self.rule()))
        self.submissions.append((await self.world.ledger.submissions.submit(spec)).id)

    async def they_claim(self) -> None:
        await self.world.ledger.nodes.claim("node", ClaimRollouts(self.random.randint(1, 4), TTL))

    async def they_give_back(self) -> None:
        await self.world.ledger.nodes.release("node")

    async def they_play(self) -> None:
        await self.world.play(await self.rollout(), **self.sampled())

    async def they_finish(self) -> None:
        rollout = await self.rollout()
        status = self.random.choice(ENDED)
        ending: dict[str, Any] = {"scoring": self.random.choice((None, *Scoring))}
        if status in (RolloutStatus.FAILED, RolloutStatus.TIMED_OUT):
            ending["cause"] = self.random.choice((None, *Cause))
        reward = NewReward(rollout.id, self.random.choice((0.0, 1.0)), attempt=rollout.attempt)
        with suppress(RolltapError):
            await self.world.ledger.rewards.append(reward)
        finish = FinishRollout(status, rollout.attempt, self.random.choice(REASONS), **ending)
        await self.world.ledger.rollouts.finish(rollout.id, finish)

    they_end = they_finish

    async def they_run_a_group(self) -> None:
        for rollout in (await self.group()).rollouts:
            played = await self.world.play(rollout, **self.sampled())
            await self.world.ledger.rewards.append(NewReward(rollout.id, self.random.choice((0.0, 1.0))))
            await self.world.ledger.rollouts.finish(rollout.id, FinishRollout(RolloutStatus.SUCCEEDED, played.attempt))

    they_run_another_group = they_run_a_group

    async def they_cancel(self) -> None:
        if self.random.random() < 0.3 and self.submissions:
            await self.world.ledger.submissions.cancel(self.random.choice(self.submissions))
        elif self.random.random() < 0.5:
            await self.world.ledger.groups.cancel((await self.group()).id, self.random.choice(REASONS))

    async def they_revive(self) -> None:
        for dead in await self.world.ledger.groups.dead_letters():
            await self.world.ledger.groups.revive(dead.group.id)

    async def they_lease(self) -> None:
        name, incarnation = self.random.choice([*self.incarnations.items()])
        options: dict[str, Any] = {"max_staleness": self.random.choice((None, 0, 5)), "ttl": TTL}
        request = LeaseRequest(name, self.random.choice(POLICIES), 2, incarnation=incarnation, batch=100, **options)
        lease = await self.world.ledger.trainers.lease(request)
        self.leases += [LeaseKey(lease.id, lease.token, incarnation)] if lease.groups else []

    they_lease_more = they_lease

    async def they_end_a_lease(self) -> None:
        key = self.random.choice(self.leases) if self.leases else LeaseKey("", 0)
        trainers = self.world.ledger.trainers
        end = self.random.choice((trainers.release, lambda key: trainers.refuse(key, "bad")))
        await (trainers.acknowledge(key, 1) if self.random.random() < 0.5 else end(key))

    async def they_rewind(self) -> None:
        name = self.random.choice([*self.incarnations])
        versions = {self.random.choice(POLICIES): 0}
        rewound = await self.world.ledger.trainers.rewind(name, Rewind(0, versions, name, take_over=True))
        self.incarnations[name] = rewound.incarnation

    async def they_wait(self) -> None:
        self.world.clock.ahead += self.random.choice((1.0, TTL + 1))
        await self.world.ledger.sweep()

    async def they_push(self) -> None:
        policy = self.random.choice(POLICIES)
        version = (await self.world.ledger.policies.get(policy)).version + 1
        await self.world.ledger.policies.set_version(policy, version)


async def fresh(runner: Runner) -> World:
    await empty(runner.database)
    world = World(runner.database, clock=StillClock(), max_failures=2, infra_retries=1)
    for policy in POLICIES:
        await world.ledger.policies.register(policy)
    return world


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(4, marks=pytest.mark.timeout(100)),
        pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_kept_counts_are_right_after_any_order_of_operations(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    monkeypatch.setattr(counts, "MANY", 20)
    kinds: set[str] = set()

    async def case(seed: int) -> None:
        world = await fresh(runner)
        users = Users(world, seed)
        for number in range(60):
            await users.act()
            if number % 6 == 0:
                await world.check_counts()
        await world.ledger.sweep()
        await world.check_counts()
        for policy in POLICIES:
            kinds.update(await runner.database.query(lambda it, name=policy: counts.counted(Tx(it, 0.0), name)))

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @example(1)
    @example(7)
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        runner(case(seed))

    run()
    assert kinds == {"groups", "ready", "zero_variance", "untrained", "rollouts", "unanswered", "queued"}


@pytest.mark.timeout(100)
def test_kept_counts_are_right_after_many_at_once(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """They fold while others write. On Postgres their transactions overlap."""
    monkeypatch.setattr(counts, "MANY", 10)
    monkeypatch.setattr(counts, "AT_ONCE", 7)

    async def case() -> None:
        world = await fresh(runner)

        async def work(seed: int) -> None:
            users = Users(world, seed)
            for _ in range(25):
                await users.act()
                await world.ledger.sweep()

        await asyncio.gather(*map(work, range(6)))
        await world.check_counts()

    runner(case())


@pytest.fixture(params=KINDS)
async def url(request: pytest.FixtureRequest, tmp_path: Path, postgres_server_url: str) -> AsyncIterator[str]:
    async with database_url(request.param, tmp_path, postgres_server_url) as url:
        yield url


SQLITE_TRIGGERS = "SELECT name, tbl_name FROM sqlite_master WHERE type = 'trigger' AND instr(name, '_counted') > 0"
POSTGRES_TRIGGERS = "SELECT tgname, tgrelid::regclass::text FROM pg_trigger WHERE position('_counted' IN tgname) > 0"


async def test_a_store_of_before_counts_what_it_has(url: str) -> None:
    """Once `rolltap log upgrade` has run, also for who only reads it."""

    async def used(acts: int) -> SqlCallLog:
        log = open_call_log(url)
        await log.start()
        world = World(log.database)
        for policy in POLICIES:
            await world.ledger.policies.register(policy)
        await world.check_counts()
        users = Users(world, acts)
        for _ in range(acts):
            await users.act()
        await world.check_counts()
        return log

    def back(connection: sa.Connection) -> None:
        is_sqlite = connection.dialect.name == "sqlite"
        for name, table in connection.exec_driver_sql(SQLITE_TRIGGERS if is_sqlite else POSTGRES_TRIGGERS).all():
            connection.exec_driver_sql(f"DROP TRIGGER {name}" + ("" if is_sqlite else f" ON {table}"))
        policy_counts.drop(connection)
        for statement in (*removals("rewards", connection.dialect.name), *guards("rewards", connection.dialect.name)):
            connection.exec_driver_sql(statement)
        pruned_groups.drop(connection)
        connection.exec_driver_sql("DROP INDEX lease_groups_by_group")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0104'")

    log = await used(60)
    await log.database.transact(back)
    await log.close()
    command = (sys.executable, "-m", "rolltap", "log", "upgrade", "--store", url)
    assert await (await asyncio.create_subprocess_exec(*command)).wait() == 0
    reading = open_call_log(url, writable=False)
    await reading.start()
    await World(reading.database).check_counts()
    await reading.close()
    await (await used(20)).close()


def test_a_fold_leaves_a_row_of_each_count(runner: Runner) -> None:
    async def case() -> None:
        world = await fresh(runner)
        for _ in range(5):
            await world.complete(2, policy="a")
        rows = sa.select(sa.func.count()).select_from(policy_counts)
        before = await runner.database.query(lambda connection: connection.scalar(rows)) or 0
        await runner.database.transact(lambda connection: counts.fold(Tx(connection, 0.0), 2**40))
        assert before > 20
        assert await runner.database.query(lambda connection: connection.scalar(rows)) == 3
        await world.check_counts()

    runner(case())
