"""What the ledger forgets by age, and what stays of it, on every database."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rolltap.calllog.database import Database
from rolltap.calllog.sql import open_call_log
from rolltap.cli.main import app
from rolltap.contract.admin import ClaimRollouts, FinishRollout, NewReward
from rolltap.contract.trainer import LeaseRequest, Replay, Rewind
from rolltap.errors import LeaseLost, LedgerError, NotFound, StoreError
from rolltap.ledger.counts import counted
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.pruning import (
    FINAL,
    GroupReason,
    LedgerPruned,
    check_documents,
    plan_ledger_pruning,
    prune_ledger,
    rewards_document,
)
from rolltap.ledger.rewards import verify_rewards
from rolltap.ledger.schema import groups, leases, policies, pruned_groups, submissions, submitted
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import Group, GroupStatus, RolloutStatus, Task

from ..unit.calllog.facts import a_session, append
from ..unit.ledger.world import KINDS, StillClock, World, database_url, empty, key, wants
from .ledger_trainers import Runner
from .test_counts import POLICIES, Users

in_module = pytest.mark.asyncio(loop_scope="module")
"""The loop that `database` lives in."""

LATE = 4e9


async def trained(world: World, step: int, policy: str = "policy", n: int = 2) -> tuple[Group, Any]:
    group = await world.complete(n, policy=policy)
    lease = await world.ledger.trainers.lease(LeaseRequest("trainer", policy, 1, batch=100))
    await world.ledger.trainers.acknowledge(key(lease), step)
    return group, lease


async def decided(database: Database, before: float = LATE, **options: Any) -> dict[str, GroupReason]:
    return {each.group_id: each.reason for each in await plan_ledger_pruning(database, before=before, **options)}


async def pruned(database: Database, before: float = LATE, **options: Any) -> LedgerPruned:
    return await prune_ledger(database, await plan_ledger_pruning(database, before=before), before=before, **options)


async def rows(database: Database, table: sa.Table) -> list[Any]:
    return list(await database.query(lambda connection: connection.execute(sa.select(table)).all()))


async def kept_counts(database: Database) -> dict[str, Any]:
    def work(connection: sa.Connection) -> dict[str, Any]:
        tx = Tx(connection, 0.0)
        return {name: dict(counted(tx, name)) for (name,) in tx.all(sa.select(policies.c.name))}

    return await database.query(work)


@pytest_asyncio.fixture(loop_scope="module")
async def old(database: Database) -> AsyncIterator[World]:
    """Its counts are of more than what is on record at the end."""
    await empty(database)
    world = World(database)
    await world.ledger.policies.register("policy", tokenizer_hash="abc")
    yield world
    await empty(database)


@in_module
async def test_a_trained_group_goes_and_what_it_was_paid_can_be_proved(
    old: World, database: Database, tmp_path: Path
) -> None:
    (group, _), (last, _) = await trained(old, 1), await trained(old, 2)
    before, counts = await verify_rewards(database), await kept_counts(database)
    path = tmp_path / "rewards.jsonl"
    with rewards_document(path) as keep:
        done = await pruned(database, keep=keep)
    assert done == LedgerPruned(groups=1, rollouts=2, rewards=2, leases=1)
    assert [each.id for each in await old.groups()] == [last.id]
    after = await verify_rewards(database)
    assert (after.rewards, after.pruned, after.problems) == (2, 2, [])
    assert after.digest == before.digest
    assert await kept_counts(database) == counts
    (kept,) = await rows(database, pruned_groups)
    assert (kept.group_id, kept.status, kept.acked_by, kept.acked_step) == (group.id, "acknowledged", "trainer", 1)
    checked = await check_documents(database, [path])
    assert (checked.groups, checked.problems) == (1, [])
    path.write_text(path.read_text().replace('"value": 1.0', '"value": 0.5'))
    assert group.id in (await check_documents(database, [path])).problems[0]
    assert await pruned(database) == LedgerPruned()
    assert (await old.ledger.trainers.rewind("trainer", Rewind(0, {"policy": 0}, "run"))).pruned == 1


@in_module
async def test_late_requests_are_refused_and_ids_stay_taken(old: World, database: Database) -> None:
    (group, lease), _ = await trained(old, 1), await trained(old, 2)
    spec = GroupSpec("policy", 1, Task("t", "do it"))
    await old.ledger.groups.open(spec, group_id="mine")
    await old.ledger.groups.cancel("mine")
    assert (await pruned(database)).groups == 2
    rollout, everything = group.rollouts[0], await rows(database, groups)
    for request in (
        old.ledger.rollouts.finish(rollout.id, FinishRollout(RolloutStatus.SUCCEEDED, 1)),
        old.ledger.rollouts.start(rollout.id, "again"),
        old.ledger.rewards.append(NewReward(rollout.id, 1.0, id=rollout.rewards[0].id)),
        old.ledger.groups.get(group.id),
        old.ledger.groups.revive(group.id),
    ):
        with pytest.raises(NotFound):
            await request
    with pytest.raises(LeaseLost, match="pruned"):
        await old.ledger.trainers.acknowledge(key(lease), 1)
    for again in (spec, GroupSpec("policy", 2, Task("t", "do it"))):
        with pytest.raises(LedgerError, match="pruned on"):
            await old.ledger.groups.open(again, group_id="mine")
    assert await rows(database, groups) == everything
    assert (await old.ledger.trainers.lease(wants(replay=Replay()))).groups[0].group.id != group.id


@in_module
async def test_what_may_still_be_needed_stays_with_a_reason(old: World, database: Database) -> None:
    (first, _), (second, _) = await trained(old, 1), await trained(old, 2)
    ready, under_way = await old.complete(1), await old.open(1)
    dropped = await old.open(1)
    await old.ledger.groups.cancel(dropped.id)
    reasons = await decided(database)
    assert reasons == {
        first.id: GroupReason.OVER,
        second.id: GroupReason.LAST_STEP,
        ready.id: GroupReason.WAITING,
        under_way.id: GroupReason.WAITING,
        dropped.id: GroupReason.OVER,
    }
    assert (await decided(database, before=1.0))[first.id] is GroupReason.RECENT
    replay = await old.ledger.trainers.lease(wants(2, replay=Replay()))
    assert (await decided(database))[first.id] is GroupReason.REPLAYED
    await old.ledger.trainers.release(key(replay))
    await old.ledger.rewards.append(NewReward(first.rollouts[0].id, 1.0, scope="role:judge"))
    now = await database.now()
    assert (await decided(database, before=now - 3600))[first.id] is GroupReason.RECENT


@in_module
async def test_a_submission_goes_as_a_whole(old: World, database: Database) -> None:
    tasks = tuple(Task(f"t{number}", "do it") for number in range(2))
    spec = SubmissionSpec("policy", 1, tasks)
    await old.ledger.submissions.submit(spec, submission_id="s")
    claimed = await old.ledger.nodes.claim("node", ClaimRollouts(1, 60.0))
    assert claimed
    (group,) = await old.groups()
    await old.ledger.nodes.release("node")
    await old.ledger.groups.cancel(group.id)
    assert await decided(database) == {group.id: GroupReason.SUBMISSION}
    await old.ledger.submissions.cancel("s")
    assert await pruned(database) == LedgerPruned(groups=1, rollouts=1, tasks=2)
    assert (await rows(database, submitted), len(await rows(database, submissions))) == ([], 1)
    with pytest.raises(LedgerError, match="pruned"):
        await old.ledger.submissions.submit(spec, submission_id="s")


@in_module
async def test_a_submission_whose_parts_stay_away_goes(old: World, database: Database) -> None:
    part = SubmissionSpec("policy", 1, (Task("t", "do it"),), total=2)
    await old.ledger.submissions.submit(part, submission_id="s")
    await pruned(database, before=await database.now() - 3600)
    with pytest.raises(NotFound, match="1 of its 2 tasks have come"):
        await old.ledger.submissions.get("s")
    await pruned(database)
    with pytest.raises(NotFound, match="no submission 's'"):
        await old.ledger.submissions.get("s")


@in_module
async def test_the_database_lets_go_of_no_other_reward(old: World, database: Database) -> None:
    await trained(old, 1)
    await trained(old, 2)
    await pruned(database)
    for statement in ("DELETE FROM rewards", "UPDATE rewards SET value = 1", "DELETE FROM pruned_groups"):
        with pytest.raises(StoreError, match="append-only"):
            await database.transact(lambda connection, text=statement: connection.exec_driver_sql(text))


async def history(database: Database, seed: int, folder: Path) -> int:
    """A prune within a random history: what was open goes on as if there had been none. Returns what went."""
    await empty(database)
    world = World(database, clock=StillClock(), max_failures=2, infra_retries=1)
    for policy in POLICIES:
        await world.ledger.policies.register(policy)
    users = Users(world, seed)
    for _ in range(60):
        await users.act()
    before, counts, digest = await world.groups(), await kept_counts(database), await verify_rewards(database)
    path = folder / f"{users.random.random()}.jsonl"
    with rewards_document(path) as keep:
        done = await pruned(database, keep=keep)
    gone = {row.group_id: row for row in await rows(database, pruned_groups)}
    after = await world.groups()
    assert [group for group in before if group.id not in gone] == after
    assert {group.id for group in after}.isdisjoint(gone)
    assert all(group.status in FINAL for group in before if group.id in gone)
    assert done.groups == len(gone)
    assert await kept_counts(database) == counts
    found = await verify_rewards(database)
    assert (found.digest, found.problems) == (digest.digest, [])
    checked = await check_documents(database, [path])
    assert (checked.groups, checked.problems) == (sum(row.digest is not None for row in gone.values()), [])
    for _ in range(40):
        await users.act()
    assert set(gone).isdisjoint(group.id for group in await world.groups())
    for row in await rows(database, leases):
        if row.status == "open":
            await world.ledger.trainers.policies_of_lease(row.id)
    for name in POLICIES:
        lease = await world.ledger.trainers.lease(
            LeaseRequest("last", name, 50, batch=100, incarnation=await owner(world, name))
        )
        assert all(group.group.status is GroupStatus.LEASED for group in lease.groups)
    assert (await verify_rewards(database)).problems == []
    return done.groups


async def owner(world: World, policy: str) -> int:
    return (await world.ledger.trainers.rewind("last", Rewind(0, {policy: 0}, "last", take_over=True))).incarnation


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(4, marks=pytest.mark.timeout(100)),
        pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_a_prune_within_any_history(runner: Runner, tmp_path: Path, examples: int) -> None:
    """56 CPU seconds with 100 histories, on Postgres."""
    went = 0

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        nonlocal went
        went += runner(history(runner.database, seed, tmp_path))

    run()
    assert went


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_prune_that_is_killed_is_continued(kind: str, tmp_path: Path, postgres_server_url: str) -> None:
    async with database_url(kind, tmp_path, postgres_server_url) as url:
        log = open_call_log(url)
        await log.start()
        world = World(log.database)
        await world.ledger.policies.register("policy", tokenizer_hash="abc")
        for _ in range(45):
            await world.complete(1)
        lease = await world.ledger.trainers.lease(wants(45, batch=100))
        await world.ledger.trainers.acknowledge(key(lease), 1)
        await trained(world, 2, n=1)
        digest = (await verify_rewards(log.database)).digest
        counts = await kept_counts(log.database)
        await log.close()
        arguments = ["log", "prune", "--older-than", "0m", "--ledger-older-than", "0m", "--store", url]
        first, second = (str(tmp_path / name) for name in ("first.jsonl", "second.jsonl"))
        command = (sys.executable, "-m", "rolltap", *arguments, "--rewards", first)
        dying = {**os.environ, "ROLLTAP_CRASH_AT": "ledger.pruning:2"}
        assert await (await asyncio.create_subprocess_exec(*command, env=dying)).wait() == -9
        log = open_call_log(url)
        await log.start()
        assert len(await rows(log.database, groups)) == 26
        assert (await verify_rewards(log.database)).digest == digest
        await log.close()
        run = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--rewards", second])
        assert "removed of the ledger: 25 groups, 25 rollouts, 25 rewards, 1 lease, 0 tasks" in run.output
        checks = ["log", "verify", "--rewards", first, "--rewards", second, "--store", url]
        verified = await asyncio.to_thread(CliRunner().invoke, app, checks)
        assert (verified.exit_code, "all sound" in verified.output) == (0, True), verified.output
        assert digest in verified.output.replace("\n", "")
        log = open_call_log(url)
        await log.start()
        assert await kept_counts(log.database) == counts
        await log.close()


async def test_a_group_goes_with_its_calls(tmp_path: Path) -> None:
    """In one run of the command, and its dry run says so; one whose calls stay, stays."""
    url = f"sqlite:///{tmp_path}/log.db"
    log = open_call_log(url)
    await log.start()
    world = World(log.database)
    await world.ledger.policies.register("policy", tokenizer_hash="abc")
    (group, _), _ = await trained(world, 1, n=1), await trained(world, 2, n=1)
    (rollout,) = group.rollouts
    session = a_session(id=rollout.session_id, rollout_id=rollout.id, expires_at=5.0)
    await log.open_session(session)
    await append(log, session)
    assert (await decided(log.database))[group.id] is GroupReason.CALLS
    assert (await decided(log.database, going={session.id}))[group.id] is GroupReason.OVER
    await log.close()
    arguments = ["log", "prune", "--older-than", "0m", "--ledger-older-than", "0m", "--store", url]

    async def run(*more: str) -> str:
        return (await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *more])).output

    dry = await run("--dry-run")
    assert "over, its calls are gone" in dry
    assert "of its trainer's" in dry
    assert "nothing was removed" in dry
    done = await run()
    assert "removed 1 call of 1 session" in done
    assert "removed of the ledger: 1 group, 1 rollout, 1 reward, 1 lease, 0 tasks" in done
    assert "expected a number" in await run("--ledger-older-than", "soon")
    alone = ["log", "prune", "--older-than", "1d", "--rewards", "x", "--store", url]
    assert "--ledger-older-than" in (await asyncio.to_thread(CliRunner().invoke, app, alone)).output
