"""Rewards are facts on each kind of database: one of each scope an attempt, never changed, and a forgery is found."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.contract.admin import DETAIL_BYTES, LARGEST_REWARD, NewReward
from rolltap.contract.keys import Caller
from rolltap.errors import InvalidRequest, LedgerError, StoreError
from rolltap.ledger.rewards import verify_rewards
from rolltap.ledger.schema import reward_guards
from rolltap.types import Rollout

from ..unit.ledger.world import World, removals, wants

pytestmark = pytest.mark.asyncio(loop_scope="module")
EVALUATOR, SECOND = Caller("key-1", "evaluator"), Caller("key-2", "evaluator")


async def started(world: World) -> Rollout:
    return await world.start((await world.open(1)).rollouts[0])


async def test_a_second_evaluators_reward_is_refused_and_nothing_is_added_up(world: World) -> None:
    rollout = await started(world)
    first = await world.ledger.rewards.append(NewReward(rollout.id, 0.25, source="tests"), EVALUATOR)
    assert first.key_id == EVALUATOR.id
    for by in (EVALUATOR, SECOND):
        with pytest.raises(LedgerError, match="scored once"):
            await world.ledger.rewards.append(NewReward(rollout.id, 1.0, source="tests"), by)
    await world.ledger.rewards.append(NewReward(rollout.id, 9.0, scope="role:judge"), SECOND)
    await world.finish(rollout, None)
    (group,) = (await world.ledger.trainers.lease(wants())).groups
    assert group.rollouts[0].reward == 0.25
    assert [reward.key_id for reward in await world.ledger.rewards.of(rollout.id)] == ["key-1", "key-2"]


@pytest.mark.parametrize("statement", ["UPDATE rewards SET value = 1", "DELETE FROM rewards"])
async def test_the_database_refuses_to_change_a_reward(world: World, database: Database, statement: str) -> None:
    rollout = await started(world)
    await world.ledger.rewards.append(NewReward(rollout.id, 0.0))
    with pytest.raises(StoreError, match="append-only"):
        await sql(database, statement)
    assert [reward.value for reward in await world.ledger.rewards.of(rollout.id)] == [0.0]
    assert (await verify_rewards(database)).problems == []


FORGERIES = {
    "a value": "UPDATE rewards SET value = 1.0 WHERE number = 0",
    "a source": "UPDATE rewards SET source = 'other' WHERE number = 1",
    "a key": "UPDATE rewards SET key_id = 'other' WHERE number = 1",
    "an attempt": "UPDATE rewards SET attempt = 2 WHERE number = 0",
    "a hash": "UPDATE rewards SET hash = 'x' WHERE number = 0",
    "the first": "DELETE FROM rewards WHERE number = 0",
    "the last": "DELETE FROM rewards WHERE number = 1",
    "all": "DELETE FROM rewards",
}


@pytest.mark.parametrize("what", FORGERIES)
async def test_what_was_changed_without_the_triggers_is_found(world: World, database: Database, what: str) -> None:
    rollout = await started(world)
    for scope in ("rollout", "role:judge"):
        await world.ledger.rewards.append(NewReward(rollout.id, 0.0, scope, detail={"why": [1, 0.1, "ü"]}), EVALUATOR)
    sound = await verify_rewards(database)
    assert (sound.rewards, sound.problems) == (2, [])
    await sql(database, *removals("rewards", database.dialect_name), FORGERIES[what])
    try:
        forged = await verify_rewards(database)
    finally:
        await sql(database, *reward_guards(database.dialect_name))
    assert forged.problems
    assert all(rollout.id in problem for problem in forged.problems)


async def test_a_chain_made_anew_shows_in_the_digest(world: World, database: Database) -> None:
    rollout = await started(world)
    await world.ledger.rewards.append(NewReward(rollout.id, 1.0))
    before = (await verify_rewards(database)).digest
    assert (await verify_rewards(database)).digest == before
    await sql(database, "UPDATE rollouts SET reward_head = NULL WHERE id = '" + rollout.id + "'")
    assert (await verify_rewards(database)).digest != before


@pytest.mark.parametrize("value", [1, -0.0, 0.1, -1e-300, 123456789.125, LARGEST_REWARD])
async def test_a_value_comes_back_from_the_database_as_it_was_hashed(
    world: World, database: Database, value: float
) -> None:
    rollout = await started(world)
    await world.ledger.rewards.append(NewReward(rollout.id, value, detail={"n": 2**53 + 1, "t": (1, 2)}))
    assert (await verify_rewards(database)).problems == []


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("value", {"value": 2 * LARGEST_REWARD}),
        ("value", {"value": float("nan")}),
        ("detail", {"detail": {"x": "y" * DETAIL_BYTES}}),
        ("detail", {"detail": {"x": float("inf")}}),
        ("scope", {"scope": "role:\x1b[31mred"}),
        ("scope", {"scope": "role:" + "r" * 129}),
        ("scope", {"scope": "call:a b"}),
        ("id", {"id": "\x1b]0;title\x07"}),
        ("id", {"id": ""}),
    ],
)
async def test_a_reward_is_bounded(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        NewReward("rollout", **{"value": 1.0, **body})
    assert refused.value.param == field


async def test_the_audit_log_can_not_be_changed_and_says_who(world: World, database: Database) -> None:
    for key in ("key-1", "key-2", "key-1"):
        await world.ledger.audit.append(key, "admin", "POST /tasks", {"n": 1})
    assert [entry.key_id for entry in await world.ledger.audit.newest(limit=2)] == ["key-1", "key-2"]
    (newest, oldest) = await world.ledger.audit.newest(key_id="key-1", limit=10)
    assert [entry.seq for entry in await world.ledger.audit.newest(before=newest.seq, limit=10)][-1] == oldest.seq
    for statement in ("UPDATE audit SET key_id = 'x'", "DELETE FROM audit"):
        with pytest.raises(StoreError, match="append-only"):
            await sql(database, statement)


async def sql(database: Database, *statements: str) -> None:
    def run(connection: sa.Connection) -> None:
        for statement in statements:
            connection.exec_driver_sql(statement)

    await database.transact(run)


async def test_an_id_of_an_earlier_attempts_reward_is_refused(world: World) -> None:
    """Else the attempt would have no reward, and its evaluator be told that it has."""
    (rollout,) = (await world.open(1)).rollouts
    await world.start(rollout, 0)
    first = NewReward(rollout.id, 1.0, id="eval", attempt=1)
    await world.ledger.rewards.append(first)
    await world.start(rollout, 0)
    await world.ledger.rewards.append(first)
    for attempt in (2, None):
        with pytest.raises(LedgerError, match="on record for attempt 1, and this is attempt 2: use a new id"):
            await world.ledger.rewards.append(NewReward(rollout.id, 1.0, id="eval", attempt=attempt))
