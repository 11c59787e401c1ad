"""The ledger's contract, over every database it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rolltap.calllog.database import Database
from rolltap.errors import (
    ConfigError,
    InvalidRequest,
    LeaseLost,
    LedgerError,
    NotFound,
    RateLimited,
    StepRegression,
    UnknownPolicy,
)
from rolltap.ledger.claims import LeaseRequest
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.replay import ReplayFilter
from rolltap.ledger.rewards import NewReward
from rolltap.ledger.rollouts import Ending
from rolltap.ledger.schema import metadata
from rolltap.types import Cause, GroupStatus, RolloutStatus, Scoring, Task

from ..unit.ledger.world import KINDS, World, database_url, empty

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres_server_url: str
) -> AsyncIterator[Database]:
    folder: Path = tmp_path_factory.mktemp("ledger")
    async with database_url(request.param, folder, postgres_server_url) as url:
        opened = Database(url)
        await opened.start(metadata)
        yield opened
        await opened.close()


@pytest_asyncio.fixture(loop_scope="module")
async def world(database: Database) -> World:
    await empty(database)
    world = World(database)
    await world.ledger.policies.register("policy", tokenizer_hash="abc")
    return world


def wants(groups: int = 1, **more: object) -> LeaseRequest:
    return LeaseRequest("trainer", "policy", groups, **more)  # type: ignore[arg-type]


async def status(world: World, group_id: str) -> GroupStatus:
    return (await world.ledger.groups.get(group_id)).status


async def test_a_group_opens_once_for_an_id(world: World) -> None:
    spec = GroupSpec("policy", 3, Task("t", "do it", {"k": 1}, ("a",)), ("x",))
    group = await world.ledger.groups.open(spec, group_id="g")
    assert [rollout.index for rollout in group.rollouts] == [0, 1, 2]
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.PENDING}
    assert group.status is GroupStatus.OPEN
    assert group.tags == ("x",)
    assert await world.ledger.groups.open(spec, group_id="g") == group
    with pytest.raises(LedgerError, match="another n and task"):
        await world.ledger.groups.open(GroupSpec("policy", 2, Task("t", "do that")), group_id="g")


async def test_two_opens_of_one_id_at_once_make_one_group(world: World) -> None:
    spec = GroupSpec("policy", 3, Task("t", "do it"))
    opened = await asyncio.gather(*(world.ledger.groups.open(spec, group_id="g") for _ in range(8)))
    assert all(group == opened[0] for group in opened)


async def test_an_unknown_policy_lists_the_known(world: World) -> None:
    with pytest.raises(UnknownPolicy, match="no policy 'other'; known: policy"):
        await world.open(policy="other")
    with pytest.raises(UnknownPolicy):
        await world.ledger.trainers.lease(LeaseRequest("trainer", "other", 1))


async def test_unknown_ids_are_named(world: World) -> None:
    with pytest.raises(NotFound, match="no group 'nope'"):
        await world.ledger.groups.get("nope")
    with pytest.raises(NotFound, match="no rollout 'nope'"):
        await world.ledger.rollouts.start("nope", "session")
    with pytest.raises(NotFound, match="no rollout 'nope'"):
        await world.ledger.rewards.append(NewReward("nope", 1.0))


async def test_a_group_is_complete_when_every_rollout_has_ended_and_been_scored(world: World) -> None:
    group = await world.open(2)
    first = await world.start(group.rollouts[0])
    second = await world.start(group.rollouts[1])
    await world.finish(first, 1.0)
    await world.finish(second, None)
    assert await status(world, group.id) is GroupStatus.OPEN  # the second one's reward is late
    await world.ledger.rewards.append(NewReward(second.id, 0.5))
    assert await status(world, group.id) is GroupStatus.COMPLETE
    assert {first.session_id, second.session_id} == world.closed


async def test_a_failed_rollout_needs_no_reward_and_a_masked_one_is_kept(world: World) -> None:
    group = await world.open(3)
    started = [await world.start(rollout) for rollout in group.rollouts]
    await world.finish(started[0], 1.0)
    failed = await world.finish(started[1], None, status=RolloutStatus.FAILED, reason="crashed")
    late = await world.finish(started[2], 0.0, status=RolloutStatus.TIMED_OUT)
    assert (failed.scoring, late.scoring) == (Scoring.UNSCORABLE, Scoring.MASKED)
    lease = await world.ledger.trainers.lease(wants())
    records = lease.groups[0].rollouts
    assert [record.reward for record in records] == [1.0, None, 0.0]
    assert [len(record.trajectory.segments) for record in records] == [1, 0, 1]


@pytest.mark.parametrize(
    ("ending", "cause", "scoring"),
    [
        ({"status": RolloutStatus.TIMED_OUT}, Cause.AGENT, Scoring.MASKED),
        ({"status": RolloutStatus.TIMED_OUT, "cause": Cause.INFRASTRUCTURE}, Cause.INFRASTRUCTURE, Scoring.UNSCORABLE),
        ({"status": RolloutStatus.FAILED, "cause": Cause.EVALUATION}, Cause.EVALUATION, Scoring.UNSCORABLE),
        ({"status": RolloutStatus.LOST}, Cause.INFRASTRUCTURE, Scoring.UNSCORABLE),
        ({"status": RolloutStatus.SUCCEEDED}, None, Scoring.SCORED),
    ],
)
async def test_an_end_says_whose_doing_it_was(
    world: World, ending: dict[str, Any], cause: Cause | None, scoring: Scoring
) -> None:
    group = await world.open(2)
    ended = await world.finish(await world.start(group.rollouts[0]), 0.5, **ending)
    assert (ended.cause, ended.scoring) == (cause, scoring)
    (event,) = [one for one in await world.ledger.events.since(0) if one.kind == "rollout_finished"]
    assert event.data["cause"] == cause


async def test_an_end_has_a_cause_that_can_be() -> None:
    for status, cause in ((RolloutStatus.SUCCEEDED, Cause.AGENT), (RolloutStatus.TIMED_OUT, Cause.EVALUATION)):
        with pytest.raises(InvalidRequest, match="is no cause of"):
            Ending(status, 1, cause=cause)


async def test_a_group_without_a_usable_rollout_is_dropped(world: World) -> None:
    group = await world.open(2)
    for rollout in group.rollouts:
        await world.finish(await world.start(rollout), None, status=RolloutStatus.FAILED)
    assert await status(world, group.id) is GroupStatus.DROPPED
    assert (await world.ledger.trainers.lease(wants())).groups == ()


async def test_a_rollout_ends_once(world: World) -> None:
    group = await world.open(1)
    rollout = await world.start(group.rollouts[0])
    ended = await world.finish(rollout, 1.0)
    assert await world.finish(rollout, None) == ended
    with pytest.raises(LedgerError, match="has ended as succeeded, not failed"):
        await world.ledger.rollouts.finish(rollout.id, Ending(RolloutStatus.FAILED, rollout.attempt))
    with pytest.raises(LedgerError, match="can't be started again"):
        await world.start(rollout)


async def test_a_new_attempt_fences_the_old_one(world: World) -> None:
    group = await world.open(1)
    old = await world.start(group.rollouts[0])
    await world.ledger.rewards.append(NewReward(old.id, 5.0, attempt=1))
    new = await world.start(group.rollouts[0])
    assert new.attempt == 2
    assert world.closed == {old.session_id}
    with pytest.raises(LedgerError, match="is at attempt 2; attempt 1 can't end it"):
        await world.finish(old, None)
    with pytest.raises(LedgerError, match="a reward for attempt 1 comes too late"):
        await world.ledger.rewards.append(NewReward(old.id, 5.0, attempt=1))
    await world.finish(new, 1.0)
    lease = await world.ledger.trainers.lease(wants())
    assert lease.groups[0].rollouts[0].reward == 1.0  # the old attempt's reward does not count
    assert len(await world.ledger.rewards.of(old.id)) == 2  # but is still on record


async def test_rewards_are_appended_once_and_add_up(world: World) -> None:
    group = await world.open(1)
    rollout = await world.start(group.rollouts[0])
    first = await world.ledger.rewards.append(NewReward(rollout.id, 0.25, source="tests"), reward_id="r")
    again = await world.ledger.rewards.append(NewReward(rollout.id, 0.25, source="tests"), reward_id="r")
    assert again == first
    with pytest.raises(LedgerError, match="another value"):
        await world.ledger.rewards.append(NewReward(rollout.id, 0.75), reward_id="r")
    await world.ledger.rewards.append(NewReward(rollout.id, 9.0, scope="role:judge"))
    await world.finish(rollout, 0.5)
    lease = await world.ledger.trainers.lease(wants())
    assert lease.groups[0].rollouts[0].reward == 0.75


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_a_reward_is_finite(value: float) -> None:
    with pytest.raises(InvalidRequest, match="finite"):
        NewReward("rollout", value)


@pytest.mark.parametrize("scope", ["", "turn", "call:", "span:c:3", "span:c:3:3", "role:", "rollout:1"])
async def test_a_reward_has_a_known_scope(scope: str) -> None:
    with pytest.raises(InvalidRequest, match="scope"):
        NewReward("rollout", 1.0, scope)


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
        await world.ledger.trainers.release(lease.id, lease.token)
        tokens.append(lease.token)
    assert tokens == sorted(set(tokens))


async def test_an_expired_lease_is_lost_and_its_groups_come_back(world: World) -> None:
    group = await world.complete(1)
    old = await world.ledger.trainers.lease(wants(ttl=60))
    world.clock.ahead += 61
    with pytest.raises(LeaseLost, match="expired"):
        await world.ledger.trainers.acknowledge(old.id, old.token, 1)
    new = await world.ledger.trainers.lease(LeaseRequest("second", "policy", 1))
    assert new.groups[0].group.id == group.id
    assert new.token > old.token
    for refused in (
        world.ledger.trainers.acknowledge(old.id, old.token, 1),
        world.ledger.trainers.extend(old.id, old.token, 60),
        world.ledger.trainers.refuse(old.id, old.token, "late"),
        world.ledger.trainers.acknowledge(new.id, old.token, 1),
        world.ledger.trainers.acknowledge("nope", new.token, 1),
    ):
        with pytest.raises(LeaseLost):
            await refused
    assert await status(world, group.id) is GroupStatus.LEASED
    assert await world.ledger.trainers.acknowledge(new.id, new.token, 1) == 1


async def test_an_extended_lease_holds(world: World) -> None:
    await world.complete(1)
    lease = await world.ledger.trainers.lease(wants(ttl=60))
    world.clock.ahead += 50
    assert await world.ledger.trainers.extend(lease.id, lease.token, 60) == 60
    world.clock.ahead += 50
    await world.ledger.sweep()
    assert await world.ledger.trainers.acknowledge(lease.id, lease.token, 1) == 1


async def test_an_acknowledgement_can_be_repeated_but_not_changed(world: World) -> None:
    group = await world.complete(1)
    lease = await world.ledger.trainers.lease(wants())
    assert await world.ledger.trainers.acknowledge(lease.id, lease.token, 4) == 1
    assert await world.ledger.trainers.acknowledge(lease.id, lease.token, 4) == 1
    with pytest.raises(LeaseLost, match="is acknowledged"):
        await world.ledger.trainers.acknowledge(lease.id, lease.token, 5)
    assert await status(world, group.id) is GroupStatus.ACKNOWLEDGED


async def test_a_step_never_goes_backwards(world: World) -> None:
    for step in (3, 3):
        await world.complete(1)
        lease = await world.ledger.trainers.lease(wants())
        await world.ledger.trainers.acknowledge(lease.id, lease.token, step)
    await world.complete(1)
    lease = await world.ledger.trainers.lease(wants())
    with pytest.raises(StepRegression, match="has acknowledged step 3; step 2 is behind it"):
        await world.ledger.trainers.acknowledge(lease.id, lease.token, 2)
    assert await world.ledger.trainers.acknowledge(lease.id, lease.token, 4) == 1


async def test_a_rewind_brings_back_exactly_what_came_after(world: World) -> None:
    ids = []
    for step in (1, 2, 3):
        ids.append((await world.complete(1)).id)
        lease = await world.ledger.trainers.lease(wants())
        await world.ledger.trainers.acknowledge(lease.id, lease.token, step)
    held = (await world.complete(1)).id
    open_lease = await world.ledger.trainers.lease(wants())
    other = await world.complete(1)
    foreign = await world.ledger.trainers.lease(LeaseRequest("second", "policy", 1))
    await world.ledger.trainers.acknowledge(foreign.id, foreign.token, 9)

    rewound = await world.ledger.trainers.rewind("trainer", 1)
    assert (rewound.acknowledged, rewound.leased) == (2, 1)
    with pytest.raises(LeaseLost, match="rewound"):
        await world.ledger.trainers.acknowledge(open_lease.id, open_lease.token, 4)
    with pytest.raises(LeaseLost, match="rewound"):  # a retry by the dead process
        await world.ledger.trainers.acknowledge(lease.id, lease.token, 3)
    again = await world.ledger.trainers.lease(wants(9))
    assert {group.group.id for group in again.groups} == {*ids[1:], held}
    assert await status(world, ids[0]) is GroupStatus.ACKNOWLEDGED
    assert await status(world, other.id) is GroupStatus.ACKNOWLEDGED
    assert await world.ledger.trainers.acknowledge(again.id, again.token, 2) == 3


async def test_a_group_that_is_refused_too_often_is_dead_until_revived(world: World) -> None:
    poisoned, fine = (await world.complete(1)).id, (await world.complete(1)).id
    for number in range(3):
        lease = await world.ledger.trainers.lease(wants(2))
        dead = await world.ledger.trainers.refuse(lease.id, lease.token, f"NaN {number}", [poisoned])
        assert dead == (number == 2)
    assert [(letter.group.id, letter.reason) for letter in await world.ledger.trainers.dead_letters()] == [
        (poisoned, "NaN 2")
    ]
    lease = await world.ledger.trainers.lease(wants(2))
    assert [group.group.id for group in lease.groups] == [fine]
    with pytest.raises(LedgerError, match="not dead"):
        await world.ledger.trainers.revive(fine)
    await world.ledger.trainers.revive(poisoned)
    lease = await world.ledger.trainers.lease(wants(2))
    assert [group.group.id for group in lease.groups] == [poisoned]
    with pytest.raises(InvalidRequest, match="not groups of lease"):
        await world.ledger.trainers.refuse(lease.id, lease.token, "?", [fine])


async def test_a_group_that_cannot_be_rebuilt_is_not_delivered(world: World) -> None:
    broken, fine = await world.complete(1), await world.complete(1)
    world.corrupt.add(str(broken.rollouts[0].session_id))
    lease = await world.ledger.trainers.lease(wants(2))
    assert [group.group.id for group in lease.groups] == [fine.id]
    for _ in range(2):
        assert (await world.ledger.trainers.lease(wants(2))).groups == ()
    letters = await world.ledger.trainers.dead_letters("policy")
    assert [letter.group.id for letter in letters] == [broken.id]
    assert "record_corrupt" in letters[0].reason


async def test_a_group_whose_calls_were_removed_is_not_delivered_as_if_it_had_none(world: World) -> None:
    whole, pruned = await world.complete(2), await world.complete(2)
    lease = await world.ledger.trainers.lease(wants(2))
    await world.ledger.trainers.acknowledge(lease.id, lease.token, 2)
    world.pruned.add(str(pruned.rollouts[1].session_id))
    replay = await world.ledger.trainers.replay(wants(2), ReplayFilter())
    assert [one.group.id for one in replay.groups] == [whole.id]
    await world.ledger.trainers.rewind("trainer", 1)
    for _ in range(3):
        lease = await world.ledger.trainers.lease(wants(2))
        assert [one.group.id for one in lease.groups] == [whole.id]
        await world.ledger.trainers.release(lease.id, lease.token)
    (letter,) = await world.ledger.trainers.dead_letters()
    assert letter.group.id == pruned.id
    assert pruned.rollouts[1].id in letter.reason


async def test_a_mean_reward_is_of_the_usable_rollouts(world: World) -> None:
    group = await world.open(3)
    good, poor, failed = [await world.start(rollout) for rollout in group.rollouts]
    await world.finish(good, 1.0)
    await world.finish(poor, 0.0)
    await world.finish(failed, -5.0, status=RolloutStatus.FAILED)
    lease = await world.ledger.trainers.lease(wants())
    await world.ledger.trainers.acknowledge(lease.id, lease.token, 1)
    replay = await world.ledger.trainers.replay(wants(), ReplayFilter(min_reward=0.5, max_reward=0.5))
    assert [one.group.id for one in replay.groups] == [group.id]


async def test_a_rollout_whose_record_is_corrupt_ends_unscorable(world: World) -> None:
    group = await world.open(2)
    broken, fine = [await world.start(rollout) for rollout in group.rollouts]
    world.corrupt.add(str(broken.session_id))
    ended = await world.finish(broken, 1.0, reason="done")
    assert (ended.status, ended.scoring) == (RolloutStatus.SUCCEEDED, Scoring.UNSCORABLE)
    assert ended.reason.startswith("done; record_corrupt: ")
    await world.finish(fine, 1.0)
    assert await status(world, group.id) is GroupStatus.COMPLETE


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


async def test_versions_go_back_only_after_a_rewind(world: World) -> None:
    await world.ledger.trainers.lease(wants())
    await world.ledger.policies.set_version("policy", 5)
    await world.ledger.policies.set_version("policy", 5)
    with pytest.raises(LedgerError, match="at version 5; it goes back to 3 only after a rewind"):
        await world.ledger.policies.set_version("policy", 3)
    await world.ledger.trainers.rewind("trainer", 3)
    await world.ledger.policies.set_version("policy", 3)
    with pytest.raises(LedgerError, match="only after a rewind"):
        await world.ledger.policies.set_version("policy", 2)
    assert (await world.ledger.policies.get("policy")).version == 3


async def test_a_policy_keeps_its_tokenizer(world: World) -> None:
    await world.ledger.policies.set_version("policy", 2)
    assert (await world.ledger.policies.register("policy", tokenizer_hash="abc")).version == 2
    with pytest.raises(ConfigError, match="on record with tokenizer abc"):
        await world.ledger.policies.register("policy", tokenizer_hash="def")


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
    await world.ledger.trainers.acknowledge(lease.id, lease.token, 1)
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
    waiting = asyncio.create_task(world.ledger.trainers.lease(wants(2), wait=30))
    first = await world.complete(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    second = await world.complete(1)
    async with asyncio.timeout(5):
        lease = await waiting
    assert {group.group.id for group in lease.groups} == {first.id, second.id}


async def test_a_lease_that_waited_in_vain_takes_what_is_there(world: World) -> None:
    group = await world.complete(1)
    lease = await world.ledger.trainers.lease(wants(2), wait=0.1)
    assert [one.group.id for one in lease.groups] == [group.id]
    none = await world.ledger.trainers.lease(wants(2), wait=0.1)
    assert (none.groups, none.token) == ((), 0)


async def test_a_deadline_drops_or_leaves_out(world: World) -> None:
    dropped, partial = await world.open(2, deadline=60), await world.open(3, deadline=60, late="partial", min_usable=2)
    for group in (dropped, partial):
        for rollout in group.rollouts[:-1]:
            await world.finish(await world.start(rollout), 1.0)
    slow = await world.start(partial.rollouts[-1])
    world.clock.ahead += 61
    await world.ledger.sweep()
    assert await status(world, dropped.id) is GroupStatus.DROPPED
    lease = await world.ledger.trainers.lease(wants())
    assert [one.group.id for one in lease.groups] == [partial.id]
    left_out = lease.groups[0].rollouts[-1].rollout
    assert (left_out.status, left_out.scoring) == (RolloutStatus.CANCELLED, Scoring.UNSCORABLE)
    assert slow.session_id in world.closed
    with pytest.raises(LedgerError, match="has ended as cancelled"):
        await world.finish(slow, None)


async def test_enough_usable_rollouts_end_the_others(world: World) -> None:
    group = await world.open(3, usable=2, spares=1)
    started = [await world.start(rollout) for rollout in group.rollouts]
    await world.finish(started[0], None, status=RolloutStatus.FAILED)
    assert len((await world.ledger.groups.get(group.id)).rollouts) == 3  # the other two may still do
    await world.finish(started[1], None, status=RolloutStatus.FAILED)
    refilled = await world.ledger.groups.get(group.id)
    assert [rollout.index for rollout in refilled.rollouts] == [0, 1, 2, 3]
    await world.finish(started[2], 1.0)
    await world.finish(await world.start(refilled.rollouts[3]), 0.0)
    assert await status(world, group.id) is GroupStatus.COMPLETE


async def test_zero_variance_is_counted_and_replaced_if_asked(world: World) -> None:
    kept, replaced = await world.open(2), await world.open(2, zero_variance="replace")
    for group in (kept, replaced):
        for rollout in group.rollouts:
            await world.finish(await world.start(rollout), 1.0)
    assert await status(world, kept.id) is GroupStatus.COMPLETE
    assert await status(world, replaced.id) is GroupStatus.DROPPED
    assert (await world.ledger.policies.stats("policy")).zero_variance == 2
    fresh = await world.ledger.groups.list(task_id=replaced.task_id, status=GroupStatus.OPEN)
    assert [(len(group.rollouts), group.task_id) for group in fresh] == [(2, replaced.task_id)]


async def test_a_group_waits_for_the_scopes_it_asks_for(world: World) -> None:
    group = await world.open(1, scopes=("rollout", "call:each", "role:solver"))
    rollout = await world.start(group.rollouts[0])
    await world.finish(rollout, 1.0)
    for scope in ("role:solver", "call:foreign", f"call:call-{rollout.session_id}"):
        assert await status(world, group.id) is GroupStatus.OPEN
        await world.ledger.rewards.append(NewReward(rollout.id, 1.0, scope))
    assert await status(world, group.id) is GroupStatus.COMPLETE


async def test_a_cancelled_group_ends_its_rollouts(world: World) -> None:
    group = await world.open(2)
    running = await world.start(group.rollouts[0])
    cancelled = await world.ledger.groups.cancel(group.id, "no longer wanted")
    assert cancelled.status is GroupStatus.DROPPED
    assert {rollout.status for rollout in cancelled.rollouts} == {RolloutStatus.CANCELLED}
    assert world.closed == {running.session_id}
    assert await world.ledger.groups.cancel(group.id) == cancelled
    complete = await world.complete(1)
    with pytest.raises(LedgerError, match="only an open one"):
        await world.ledger.groups.cancel(complete.id)


async def test_acknowledged_groups_are_leased_again_as_replay(world: World) -> None:
    ids = [(await world.complete(2, version)).id for version in (0, 2)]
    assert (await world.ledger.trainers.replay(wants(2), ReplayFilter())).groups == ()
    lease = await world.ledger.trainers.lease(wants(2))
    await world.ledger.trainers.acknowledge(lease.id, lease.token, 1)
    await world.ledger.policies.set_version("policy", 3)
    replay = await world.ledger.trainers.replay(wants(2), ReplayFilter(max_age=2, min_reward=0.5))
    assert [(one.group.id, one.replay) for one in replay.groups] == [(ids[1], True)]
    assert await world.ledger.trainers.acknowledge(replay.id, replay.token, 2) == 1
    assert await status(world, ids[1]) is GroupStatus.ACKNOWLEDGED
    assert (await world.ledger.trainers.replay(wants(2), ReplayFilter(tags=("rare",)))).groups == ()
    everything = await world.ledger.trainers.replay(wants(2), ReplayFilter())
    assert [one.group.id for one in everything.groups] == [ids[1], ids[0]]


async def test_events_tell_what_happened_in_order(world: World) -> None:
    before = await world.ledger.events.last()
    group = await world.complete(1)
    lease = await world.ledger.trainers.lease(wants())
    await world.ledger.trainers.acknowledge(lease.id, lease.token, 1)
    kinds = []
    async with asyncio.timeout(5):
        async for event in world.ledger.events.follow(before):
            kinds.append(event.kind)
            if event.kind == "acknowledged":
                break
    assert kinds == [
        "group_opened",
        "rollout_started",
        "reward",
        "rollout_finished",
        "group_complete",
        "leased",
        "acknowledged",
    ]
    assert [event.subject for event in await world.ledger.events.since(before, limit=1)] == [group.id]


async def test_groups_are_listed_newest_first_in_pages(world: World) -> None:
    ids = [(await world.open(1)).id for _ in range(5)]
    first = await world.ledger.groups.list(limit=3)
    rest = await world.ledger.groups.list(limit=3, before=first[-1].id)
    assert [group.id for group in (*first, *rest)] == ids[::-1]
