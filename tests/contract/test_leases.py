"""Leases, one suite over both databases: whole groups, given once, acknowledged once, and what a rewind brings back."""

from __future__ import annotations

import asyncio
from contextvars import Context, copy_context

import msgspec
import pytest

from rolltap.contract.operations import RequestTry, current_try
from rolltap.contract.trainer import Lease, LeaseRequest, Replay, Rewind
from rolltap.errors import (
    InvalidRequest,
    LeaseLost,
    LedgerError,
    RateLimited,
    StepRegression,
    StoreUnavailable,
    TrainerFenced,
)
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.rebuilding import OpenedLease
from rolltap.types import GroupStatus

from ..unit.ledger.world import World, key, status, wants

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_lease_takes_whole_groups_with_their_tokens(world: World) -> None:
    group = await world.complete(3, 0, 1)
    await world.ledger.policies.set_version("policy", 2)
    lease = await world.ledger.trainers.lease(wants(4, max_staleness=2))
    leased = lease.groups[0]
    assert lease.policy_version == 2
    assert 0 < lease.expires_in <= 600
    assert leased.group.id == group.id
    assert leased.task.instruction == "list the files"
    assert leased.task.spec == {"files": {"a": "b"}}
    assert (leased.oldest_version, leased.newest_version) == (0, 1)
    assert [record.reward for record in leased.rollouts] == [0.0, 1.0, 0.0]
    assert all(record.trajectory.segments[0].versions[-2:].tolist() == [0, 1] for record in leased.rollouts)
    assert await status(world, group.id) is GroupStatus.LEASED


async def test_two_trainers_never_get_the_same_group(world: World) -> None:
    opened = {(await world.complete(1)).id for _ in range(6)}
    requests = [LeaseRequest(f"trainer-{number}", "policy", 2) for number in range(4)]
    leases = await asyncio.gather(*(world.ledger.trainers.lease(request) for request in requests))
    taken = [group.group.id for lease in leases for group in lease.groups]
    assert len(taken) == len(set(taken))
    assert set(taken) <= opened
    rest = await world.ledger.trainers.lease(wants(6))
    assert set(taken) | {group.group.id for group in rest.groups} == opened


async def test_policies_do_not_mix(world: World) -> None:
    await world.ledger.policies.register("other")
    group = await world.complete(1, policy="other")
    assert (await world.ledger.trainers.lease(wants())).groups == ()
    lease = await world.ledger.trainers.lease(LeaseRequest("trainer", "other", 1))
    assert lease.groups[0].group.id == group.id


async def test_fencing_tokens_only_grow(world: World) -> None:
    tokens = []
    for _ in range(3):
        await world.complete(1)
        lease = await world.ledger.trainers.lease(wants())
        await world.ledger.trainers.release(key(lease))
        tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


async def test_an_expired_lease_is_lost_and_its_groups_come_back(world: World) -> None:
    group = await world.complete(1)
    old = await world.ledger.trainers.lease(wants(ttl=60))
    world.clock.ahead += 61
    with pytest.raises(LeaseLost, match="expired"):
        await world.ledger.trainers.acknowledge(key(old), 1)
    new = await world.ledger.trainers.lease(LeaseRequest("second", "policy", 1))
    assert new.groups[0].group.id == group.id
    assert new.token > old.token
    for refused in (
        world.ledger.trainers.acknowledge(key(old), 1),
        world.ledger.trainers.extend(key(old), 60),
        world.ledger.trainers.refuse(key(old), "late"),
        world.ledger.trainers.acknowledge(LeaseKey(new.id, old.token), 1),
        world.ledger.trainers.acknowledge(LeaseKey("nope", new.token), 1),
    ):
        with pytest.raises(LeaseLost):
            await refused
    assert await status(world, group.id) is GroupStatus.LEASED
    assert await world.ledger.trainers.acknowledge(key(new), 1) == 1


async def test_an_extended_lease_holds(world: World) -> None:
    await world.complete(1)
    lease = await world.ledger.trainers.lease(wants(ttl=60))
    world.clock.ahead += 50
    assert await world.ledger.trainers.extend(key(lease), 60) == 60
    world.clock.ahead += 50
    await world.ledger.sweep()
    assert await world.ledger.trainers.acknowledge(key(lease), 1) == 1


async def test_an_acknowledgement_can_be_repeated_but_not_changed(world: World) -> None:
    group = await world.complete(1)
    lease = await world.ledger.trainers.lease(wants())
    assert await world.ledger.trainers.acknowledge(key(lease), 4) == 1
    assert await world.ledger.trainers.acknowledge(key(lease), 4) == 1
    with pytest.raises(LeaseLost, match="is acknowledged"):
        await world.ledger.trainers.acknowledge(key(lease), 5)
    assert await status(world, group.id) is GroupStatus.ACKNOWLEDGED


async def test_a_step_never_goes_backwards(world: World) -> None:
    for step in (3, 3):
        await world.complete(1)
        lease = await world.ledger.trainers.lease(wants())
        await world.ledger.trainers.acknowledge(key(lease), step)
    await world.complete(1)
    lease = await world.ledger.trainers.lease(wants())
    with pytest.raises(StepRegression, match="has acknowledged step 3; step 2 is behind it"):
        await world.ledger.trainers.acknowledge(key(lease), 2)
    assert await world.ledger.trainers.acknowledge(key(lease), 4) == 1


async def test_a_rewind_brings_back_exactly_what_came_after(world: World) -> None:
    ids = []
    for step in (1, 2, 3):
        ids.append((await world.complete(1)).id)
        lease = await world.ledger.trainers.lease(wants())
        await world.ledger.trainers.acknowledge(key(lease), step)
    held = (await world.complete(1)).id
    open_lease = await world.ledger.trainers.lease(wants())
    await world.ledger.policies.register("another")
    other = await world.complete(1, policy="another")
    foreign = await world.ledger.trainers.lease(LeaseRequest("second", "another", 1))
    await world.ledger.trainers.acknowledge(key(foreign), 9)

    rewound = await world.ledger.trainers.rewind("trainer", Rewind(1, {"policy": 0}, "run"))
    assert (rewound.acknowledged, rewound.leased) == (2, 1)
    for late, step in ((open_lease, 4), (lease, 3)):
        with pytest.raises(TrainerFenced, match="incarnation 1 since"):  # a retry by the dead process
            await world.ledger.trainers.acknowledge(key(late), step)
        with pytest.raises(LeaseLost, match="rewound"):
            await world.ledger.trainers.acknowledge(key(late, rewound.incarnation), step)
    again = await world.ledger.trainers.lease(wants(9, incarnation=rewound.incarnation))
    assert {group.group.id for group in again.groups} == {*ids[1:], held}
    assert await status(world, ids[0]) is GroupStatus.ACKNOWLEDGED
    assert await status(world, other.id) is GroupStatus.ACKNOWLEDGED
    assert await world.ledger.trainers.acknowledge(key(again, rewound.incarnation), 2) == 3


async def test_a_group_that_is_refused_too_often_is_dead_until_revived(world: World) -> None:
    poisoned, fine = (await world.complete(1)).id, (await world.complete(1)).id
    for number in range(3):
        lease = await world.ledger.trainers.lease(wants(2))
        dead = await world.ledger.trainers.refuse(key(lease), f"NaN {number}", [poisoned])
        assert dead == (number == 2)
    assert [(letter.group.id, letter.reason) for letter in await world.ledger.groups.dead_letters()] == [
        (poisoned, "NaN 2")
    ]
    lease = await world.ledger.trainers.lease(wants(2))
    assert [group.group.id for group in lease.groups] == [fine]
    with pytest.raises(LedgerError, match="not dead"):
        await world.ledger.groups.revive(fine)
    await world.ledger.groups.revive(poisoned)
    lease = await world.ledger.trainers.lease(wants(2))
    assert [group.group.id for group in lease.groups] == [poisoned]
    with pytest.raises(InvalidRequest, match="does not have the groups"):
        await world.ledger.trainers.refuse(key(lease), "?", [fine])


async def test_a_group_that_cannot_be_rebuilt_is_not_delivered(world: World) -> None:
    broken, fine = await world.complete(1), await world.complete(1)
    world.corrupt.add(str(broken.rollouts[0].session_id))
    lease = await world.ledger.trainers.lease(wants(2))
    assert [group.group.id for group in lease.groups] == [fine.id]
    for _ in range(2):
        assert await world.ledger.trainers.acknowledge(key(lease), 1) == 1
    for _ in range(2):
        assert (await world.ledger.trainers.lease(wants(2))).groups == ()
    letters = await world.ledger.groups.dead_letters("policy")
    assert [letter.group.id for letter in letters] == [broken.id]
    assert "record_corrupt" in letters[0].reason


async def test_a_group_whose_calls_were_removed_is_not_delivered_as_if_it_had_none(world: World) -> None:
    whole, pruned = await world.complete(2), await world.complete(2)
    lease = await world.ledger.trainers.lease(wants(2))
    await world.ledger.trainers.acknowledge(key(lease), 2)
    world.pruned.add(str(pruned.rollouts[1].session_id))
    replay = await world.ledger.trainers.lease(wants(2, replay=Replay()))
    assert [one.group.id for one in replay.groups] == [whole.id]
    assert await world.ledger.trainers.acknowledge(key(replay), 2) == 1
    now = (await world.ledger.trainers.rewind("trainer", Rewind(1, {"policy": 1}, "run"))).incarnation
    for _ in range(3):
        lease = await world.ledger.trainers.lease(wants(2, incarnation=now))
        assert [one.group.id for one in lease.groups] == [whole.id]
        await world.ledger.trainers.release(key(lease, now))
    (letter,) = await world.ledger.groups.dead_letters()
    assert letter.group.id == pruned.id
    assert pruned.rollouts[1].id in letter.reason


async def test_stale_groups_age_out_together_and_are_counted(world: World) -> None:
    old, new = await world.complete(2, 0, 3), await world.complete(2, 3)
    await world.ledger.policies.set_version("policy", 4)
    kept = await world.ledger.trainers.lease(wants(2, max_staleness=1, stale="keep"))
    assert [group.group.id for group in kept.groups] == [new.id]
    assert await status(world, old.id) is GroupStatus.COMPLETE
    stats = await world.ledger.policies.stats("policy")
    assert stats.staleness == {4: 1}
    dropped = await world.ledger.trainers.lease(LeaseRequest("second", "policy", 2, max_staleness=1))
    assert dropped.groups == ()
    assert await status(world, old.id) is GroupStatus.STALE
    stats = await world.ledger.policies.stats("policy")
    assert stats.groups == {"leased": 1, "stale": 1}


async def test_a_lease_that_cannot_be_delivered_keeps_no_group(world: World) -> None:
    for _ in range(4):
        await world.complete(1)
    world.unreadable = 1
    with pytest.raises(StoreUnavailable):
        await world.ledger.trainers.lease(wants(2, max_staleness=0, batch=2))
    assert len((await world.ledger.trainers.lease(wants(2, max_staleness=0, batch=2))).groups) == 2
    assert (await world.ledger.policies.stats("policy")).groups == {"complete": 2, "leased": 2}


async def test_a_lease_whose_building_is_cancelled_keeps_no_group(world: World) -> None:
    group, building = await world.complete(1), asyncio.Event()

    async def never(request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease:
        building.set()
        await asyncio.sleep(60)
        raise AssertionError("it is cancelled")

    asking = asyncio.create_task(world.ledger.trainers.built(wants(1), never))
    await building.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await status(world, group.id) is GroupStatus.COMPLETE


async def test_a_lease_whose_client_has_asked_again_meanwhile_keeps_no_group(world: World) -> None:
    group, building = await world.complete(1), asyncio.Event()

    async def never(request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease:
        building.set()
        await asyncio.sleep(60)
        raise AssertionError("it is cancelled")

    def of_try(number: int) -> Context:
        context = copy_context()
        context.run(current_try.set, RequestTry("lease", number))
        return context

    trainers = world.ledger.trainers
    asking = asyncio.create_task(trainers.built(wants(1), never), context=of_try(0))
    await building.wait()
    again = await asyncio.create_task(trainers.lease(wants(1)), context=of_try(1))
    assert not again.groups
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await status(world, group.id) is GroupStatus.COMPLETE


async def test_a_call_that_completes_after_its_rollout_ended_is_not_trained(world: World) -> None:
    group = await world.complete(1, 0, 0)
    session = str(group.rollouts[0].session_id)
    world.late.add(session)
    lease = await world.ledger.trainers.lease(wants(1))
    (record,) = lease.groups[0].rollouts
    known, late = record.trajectory.segments
    assert known.loss_mask.sum() == 2
    assert not late.loss_mask.any()
    assert [turn.trained for turn in late.turns] == [False]


async def test_a_trainer_bounds_groups_as_long_as_it_holds_a_lease(world: World) -> None:
    await world.complete(1)
    lease = await world.ledger.trainers.lease(wants(1, max_staleness=0, batch=1, ttl=3600))
    world.clock.ahead += 1800  # a long step: nothing is heard of the trainer
    assert (await world.ledger.policies.stats("policy")).room == 0
    await world.ledger.trainers.release(key(lease))
    world.clock.ahead += 1800
    assert (await world.ledger.policies.stats("policy")).room is None


async def test_outstanding_groups_are_bounded_by_what_trainers_take(world: World) -> None:
    for _ in range(5):
        await world.open(1)  # no trainer has asked: nothing bounds it
    await world.ledger.trainers.lease(wants(4, max_staleness=0))
    with pytest.raises(RateLimited) as refused:
        await world.open(1)
    assert refused.value.retry_after == 1.0
    await world.ledger.trainers.lease(wants(4, max_staleness=1))
    assert (await world.ledger.policies.stats("policy")).room == 3
    opened = [await world.complete(1) for _ in range(3)]
    with pytest.raises(RateLimited):
        await world.open(1)
    lease = await world.ledger.trainers.lease(wants(3, max_staleness=1, batch=4))
    assert len(lease.groups) == len(opened)
    with pytest.raises(RateLimited):  # leased groups still count
        await world.open(1)
    await world.ledger.trainers.acknowledge(key(lease), 1)
    await world.open(1)
    world.clock.ahead += 4000  # the trainer has not been seen for an hour
    assert (await world.ledger.policies.stats("policy")).room is None


async def test_steps_of_eight_groups_two_versions_behind_have_room_for_192_rollouts(world: World) -> None:
    """batch * (staleness + 1) groups of n rollouts: 8 * (2 + 1) * 8 (Relax, AstraFlow)."""
    await world.ledger.trainers.lease(wants(8, max_staleness=2))
    room = (await world.ledger.policies.stats("policy")).room
    assert room is not None
    assert room * 8 == 192


async def test_a_waiting_lease_is_woken(world: World) -> None:
    waiting = asyncio.create_task(world.ledger.trainers.lease(wants(2, wait=30)))
    first = await world.complete(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    second = await world.complete(1)
    async with asyncio.timeout(20):
        lease = await waiting
    assert {group.group.id for group in lease.groups} == {first.id, second.id}


async def test_a_waiting_lease_is_not_woken_by_stale_groups_of_a_lease_that_ran_out(world: World) -> None:
    """It would take what little is ready, before its time."""
    await world.complete(1)
    await world.ledger.trainers.lease(LeaseRequest("gone", "policy", 1))
    await world.ledger.policies.set_version("policy", 2)
    fresh = await world.complete(1, 2)
    world.clock.ahead += 601
    waiting = asyncio.create_task(world.ledger.trainers.lease(wants(2, max_staleness=1, stale="keep", wait=30)))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    second = await world.complete(1, 2)
    async with asyncio.timeout(20):
        lease = await waiting
    assert {group.group.id for group in lease.groups} == {fresh.id, second.id}


async def test_a_lease_that_waited_in_vain_takes_what_is_there(world: World) -> None:
    group = await world.complete(1)
    lease = await world.ledger.trainers.lease(wants(2, wait=0.1))
    assert [one.group.id for one in lease.groups] == [group.id]
    none = await world.ledger.trainers.lease(wants(2, wait=0.1))
    assert (none.groups, none.token) == ((), 0)


async def test_acknowledged_groups_are_leased_again_as_replay(world: World) -> None:
    ids = [(await world.complete(2, version)).id for version in (0, 2)]
    assert (await world.ledger.trainers.lease(wants(2, replay=Replay()))).groups == ()
    lease = await world.ledger.trainers.lease(wants(2))
    await world.ledger.trainers.acknowledge(key(lease), 1)
    await world.ledger.policies.set_version("policy", 3)
    replay = await world.ledger.trainers.lease(wants(2, replay=Replay(max_age=2, min_reward=0.5)))
    assert [(one.group.id, one.replay) for one in replay.groups] == [(ids[1], True)]
    assert await world.ledger.trainers.acknowledge(key(replay), 2) == 1
    assert await status(world, ids[1]) is GroupStatus.ACKNOWLEDGED
    assert (await world.ledger.trainers.lease(wants(2, replay=Replay(tags=("rare",))))).groups == ()
    everything = await world.ledger.trainers.lease(wants(2, replay=Replay()))
    assert [one.group.id for one in everything.groups] == [ids[1], ids[0]]


async def test_a_replay_of_some_age_has_no_tokens_of_abandoned_weights(world: World) -> None:
    """Another trainer trained a group of version 7 before that was abandoned for 5, and 9 became 5 again."""
    await world.ledger.policies.set_version("policy", 8)
    kept, abandoned = [await world.complete(2, version) for version in (5, 7)]
    lease = await world.ledger.trainers.lease(wants(2))
    await world.ledger.trainers.acknowledge(key(lease), 1)
    now = (await world.ledger.trainers.rewind("another", Rewind(5, {"policy": 5}, "run"))).incarnation
    await world.ledger.policies.set_version("policy", 9)
    wanted = LeaseRequest("another", "policy", 2, incarnation=now)
    replay = await world.ledger.trainers.lease(msgspec.structs.replace(wanted, replay=Replay(max_age=1)))
    assert [(one.group.id, one.staleness) for one in replay.groups] == [(kept.id, 0)]
    everything = await world.ledger.trainers.lease(msgspec.structs.replace(wanted, replay=Replay()))
    assert {one.group.id for one in everything.groups} == {kept.id, abandoned.id}


async def test_a_replayed_group_that_is_blamed_ends_the_lease_and_stays_trained(world: World) -> None:
    group = await world.complete(2)
    lease = await world.ledger.trainers.lease(wants())
    await world.ledger.trainers.acknowledge(key(lease), 1)
    replay = await world.ledger.trainers.lease(wants(replay=Replay()))
    assert await world.ledger.trainers.refuse(key(replay), "NaN", [group.id]) == 0
    with pytest.raises(LeaseLost, match="is refused"):
        await world.ledger.trainers.acknowledge(key(replay), 2)
    assert await status(world, group.id) is GroupStatus.ACKNOWLEDGED


async def test_stale_tokens_may_lose_their_loss_instead_of_the_group(world: World) -> None:
    """Version 2 was abandoned for 1, which goes on as 3: tokens of 0 are one update behind, those of 2 of no use."""
    spread, old = await world.complete(2, 0, 1, 2, 3, 4), await world.complete(2, 0)
    await world.ledger.policies.set_version("policy", 2)
    now = (await world.ledger.trainers.rewind("trainer", Rewind(1, {"policy": 1}, "run"))).incarnation
    await world.ledger.policies.set_version("policy", 4)
    wanted = wants(2, max_staleness=1, stale="mask", incarnation=now)
    lease = await world.ledger.trainers.lease(wanted)
    assert [one.group.id for one in lease.groups] == [spread.id]
    assert (lease.groups[0].oldest_version, lease.groups[0].staleness) == (1, 1)
    for record in lease.groups[0].rollouts:
        (segment,) = record.trajectory.segments
        assert segment.versions[segment.loss_mask].tolist() == [1, 3, 4]
        assert segment.versions[~segment.loss_mask].tolist() == [-1] * 5
        assert set(segment.logprobs[~segment.loss_mask].tolist()) == {0.0}
        assert [turn.trained for turn in segment.turns] == [True]
    assert await status(world, old.id) is GroupStatus.STALE
    await world.ledger.trainers.release(key(lease, now))
    whole = await world.ledger.trainers.lease(msgspec.structs.replace(wanted, max_staleness=None))
    assert whole.groups[0].oldest_version == 0


async def test_a_group_without_a_fresh_token_is_dropped_also_where_tokens_are_masked(world: World) -> None:
    given_up, older = await world.complete(1, 2), await world.complete(1, 0, 1)
    await world.ledger.policies.set_version("policy", 2)
    now = (await world.ledger.trainers.rewind("trainer", Rewind(1, {"policy": 1}, "run"))).incarnation
    await world.ledger.policies.set_version("policy", 5)
    lease = await world.ledger.trainers.lease(wants(2, max_staleness=1, stale="mask", incarnation=now))
    assert lease.groups == ()
    assert {await status(world, one.id) for one in (given_up, older)} == {GroupStatus.STALE}
