"""The ledger's contract, over every database it runs on."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import sqlalchemy as sa

from rolltap.contract.admin import LATE, NOTHING_SAMPLED, FinishRollout, NewReward
from rolltap.contract.trainer import BeginUpdate, LeaseRequest, Replay, Rewind
from rolltap.errors import (
    ConfigError,
    InvalidRequest,
    LedgerError,
    NotFound,
    UnknownPolicy,
)
from rolltap.ledger import ledger
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.schema import attempts
from rolltap.ledger.views import GroupQuery, group_counts, group_rows
from rolltap.types import Cause, GroupStatus, Rollout, RolloutStatus, Scoring, Task

from ..unit.ledger.world import World, key, status, wants

pytestmark = pytest.mark.asyncio(loop_scope="module")


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


async def test_a_rollout_that_ends_while_a_proxy_is_out_of_reach_says_so(world: World) -> None:
    async def late_peers(began: float) -> list[str]:
        return ["a-proxy"]

    world.ledger.rollouts._late_peers = late_peers
    group = await world.open(1)
    ended = await world.finish(await world.start(group.rollouts[0]), 1.0)
    assert ended.reason.startswith("late: a proxy could not reach the store")
    assert await status(world, group.id) is GroupStatus.COMPLETE


async def test_what_may_be_late_is_asked_of_those_who_lived_when_the_attempt_began(world: World) -> None:
    asked: list[float] = []

    async def late_peers(began: float) -> list[str]:
        asked.append(began)
        return []

    world.ledger.rollouts._late_peers = late_peers
    group = await world.open(2)
    first = await world.start(group.rollouts[0])
    again = await world.start(first)
    await world.finish(again, 1.0)
    (started_at,) = await world.database.select(sa.select(attempts.c.started_at).where(attempts.c.attempt == 2))
    assert asked == [started_at[0]]


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
    for ending, cause in ((RolloutStatus.SUCCEEDED, Cause.AGENT), (RolloutStatus.TIMED_OUT, Cause.EVALUATION)):
        with pytest.raises(InvalidRequest, match="is not a cause of"):
            FinishRollout(ending, 1, cause=cause)


async def test_a_group_without_a_usable_rollout_is_dropped(world: World) -> None:
    group = await world.open(2)
    for rollout in group.rollouts:
        await world.finish(await world.start(rollout), None, status=RolloutStatus.FAILED)
    assert await status(world, group.id) is GroupStatus.DROPPED
    assert (await world.ledger.trainers.lease(wants())).groups == ()


async def unanswered(world: World, rollout: Rollout, **ending: Any) -> Rollout:
    """A rollout that ends well, and in which no model answered."""
    started = await world.start(rollout)
    world.versions[started.session_id or ""] = ()
    return await world.finish(started, 0.0, **ending)


@pytest.mark.parametrize(
    "ending",
    [{}, {"status": RolloutStatus.TIMED_OUT}, *({"scoring": scoring} for scoring in Scoring)],
)
async def test_a_rollout_without_an_answer_is_no_baseline(world: World, ending: dict[str, Any]) -> None:
    group = await world.open(2)
    ended = await unanswered(world, group.rollouts[0], **ending)
    assert (ended.scoring, ended.reason) == (Scoring.UNSCORABLE, NOTHING_SAMPLED)
    assert ended.status is ending.get("status", RolloutStatus.FAILED)
    await world.finish(await world.start(group.rollouts[1]), 1.0)
    (leased,) = (await world.ledger.trainers.lease(wants())).groups
    assert [len(record.trajectory.segments) for record in leased.rollouts] == [0, 1]
    assert (await world.ledger.policies.stats("policy")).unanswered == 1


@pytest.mark.parametrize("status", [status for status in RolloutStatus if status.terminal])
@pytest.mark.parametrize("scoring", [None, *Scoring])
@pytest.mark.parametrize("flaw", ["never started", "no answer", "unreadable"])
async def test_a_rollout_without_a_result_is_no_success_however_it_is_reported(
    world: World, status: RolloutStatus, scoring: Scoring | None, flaw: str
) -> None:
    group = await world.open(1)
    (rollout,) = group.rollouts
    await world.ledger.rewards.append(NewReward(rollout.id, 1.0))
    if flaw != "never started":
        rollout = await world.start(rollout)
        world.versions[str(rollout.session_id)] = ()
    if flaw == "unreadable":
        world.corrupt.add(str(rollout.session_id))
    ending = FinishRollout(status, rollout.attempt, scoring=scoring)
    ended = await world.ledger.rollouts.finish(rollout.id, ending)
    assert await world.ledger.rollouts.finish(rollout.id, ending) == ended  # a repeated report changes nothing
    assert ended.status is (RolloutStatus.FAILED if status is RolloutStatus.SUCCEEDED else status)
    assert ended.scoring is Scoring.UNSCORABLE
    stats = await world.ledger.policies.stats("policy")
    assert stats.rollouts == {ended.status: 1}
    assert stats.groups == {GroupStatus.DROPPED: 1}
    other = RolloutStatus.CANCELLED if status is RolloutStatus.FAILED else RolloutStatus.FAILED
    if status is not RolloutStatus.SUCCEEDED:
        with pytest.raises(LedgerError, match="has ended as"):
            await world.ledger.rollouts.finish(rollout.id, FinishRollout(other, rollout.attempt))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("told", ["", f"{NOTHING_SAMPLED}; "])
@pytest.mark.parametrize("status", [RolloutStatus.FAILED, RolloutStatus.TIMED_OUT])
async def test_rollouts_that_failed_before_a_call_are_counted_as_unanswered(
    world: World, status: RolloutStatus, told: str, started: bool, late: bool
) -> None:
    """As of an image that no node can start, or a broken workspace; a trainer's run ends by this count."""

    async def late_peers(began: float) -> list[str]:
        return ["a-proxy"] if late else []

    world.ledger.rollouts._late_peers = late_peers
    group = await world.open(1)
    (rollout,) = group.rollouts
    for _ in range(world.ledger.settings.infra_retries + 1):
        if started:
            rollout = await world.start(rollout)
            world.versions[str(rollout.session_id)] = ()
        ending = FinishRollout(status, rollout.attempt, f"{told}no such image", cause=Cause.INFRASTRUCTURE)
        rollout = await world.ledger.rollouts.finish(rollout.id, ending)
    assert (rollout.status, rollout.cause) == (status, Cause.INFRASTRUCTURE)
    assert rollout.reason.removeprefix(f"{LATE}; ") == f"{NOTHING_SAMPLED}; no such image"
    assert (await world.ledger.policies.stats("policy")).unanswered == 1


async def test_a_group_without_an_answer_is_dropped(world: World) -> None:
    group = await world.open(2)
    for rollout in group.rollouts:
        await unanswered(world, rollout)
    assert await status(world, group.id) is GroupStatus.DROPPED
    assert (await world.ledger.policies.stats("policy")).unanswered == 2


@pytest.mark.parametrize("asks", [{}, {"max_staleness": 1}, {"max_staleness": 1, "stale": "mask"}])
async def test_a_group_without_a_trained_token_is_dropped_and_counted(world: World, asks: dict[str, Any]) -> None:
    """All of its replies are masked: a step on it would change no weights."""
    masked = await world.open(2)
    for rollout in masked.rollouts:
        await world.finish(await world.start(rollout), 1.0, scoring=Scoring.MASKED)
    trained = await world.complete(2)
    lease = await world.ledger.trainers.lease(wants(2, **asks))
    assert [leased.group.id for leased in lease.groups] == [trained.id]
    assert await status(world, masked.id) is GroupStatus.DROPPED
    stats = await world.ledger.policies.stats("policy")
    assert (stats.untrained, stats.unanswered) == (1, 0)


async def test_a_rollout_ends_once(world: World) -> None:
    group = await world.open(1)
    rollout = await world.start(group.rollouts[0])
    ended = await world.finish(rollout, 1.0)
    assert await world.finish(rollout, None) == ended
    with pytest.raises(LedgerError, match="has ended as succeeded, not failed"):
        await world.ledger.rollouts.finish(rollout.id, FinishRollout(RolloutStatus.FAILED, rollout.attempt))
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


async def test_rewards_are_appended_once(world: World) -> None:
    group = await world.open(1)
    rollout = await world.start(group.rollouts[0])
    first = await world.ledger.rewards.append(NewReward(rollout.id, 0.25, source="tests", id="r"))
    again = await world.ledger.rewards.append(NewReward(rollout.id, 0.25, source="tests", id="r"))
    assert again == first
    with pytest.raises(LedgerError, match="another value"):
        await world.ledger.rewards.append(NewReward(rollout.id, 0.75, id="r"))
    await world.ledger.rewards.append(NewReward(rollout.id, 9.0, scope="role:judge"))
    await world.finish(rollout, None)
    lease = await world.ledger.trainers.lease(wants())
    assert lease.groups[0].rollouts[0].reward == 0.25


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_a_reward_is_finite(value: float) -> None:
    with pytest.raises(InvalidRequest, match="finite"):
        NewReward("rollout", value)


@pytest.mark.parametrize("scope", ["", "turn", "call:", "span:c:3", "span:c:3:3", "role:", "rollout:1"])
async def test_a_reward_has_a_known_scope(scope: str) -> None:
    with pytest.raises(InvalidRequest, match="scope"):
        NewReward("rollout", 1.0, scope)


async def test_a_mean_reward_is_of_the_usable_rollouts(world: World) -> None:
    group = await world.open(3)
    good, poor, failed = [await world.start(rollout) for rollout in group.rollouts]
    await world.finish(good, 1.0)
    await world.finish(poor, 0.0)
    await world.finish(failed, -5.0, status=RolloutStatus.FAILED)
    lease = await world.ledger.trainers.lease(wants())
    await world.ledger.trainers.acknowledge(key(lease), 1)
    replay = await world.ledger.trainers.lease(wants(replay=Replay(min_reward=0.5, max_reward=0.5)))
    assert [one.group.id for one in replay.groups] == [group.id]


@pytest.mark.parametrize(("code", "cause"), {"corrupt": Cause.INFRASTRUCTURE, "too_large": Cause.AGENT}.items())
async def test_a_rollout_whose_record_can_not_be_read_ends_unscorable(world: World, code: str, cause: Cause) -> None:
    group = await world.open(2)
    broken, fine = [await world.start(rollout) for rollout in group.rollouts]
    getattr(world, code).add(str(broken.session_id))
    ended = await world.finish(broken, 1.0, reason="done")
    assert (ended.status, ended.scoring) == (RolloutStatus.FAILED, Scoring.UNSCORABLE)
    assert ended.cause is cause
    assert ended.reason.startswith(f"record_{code}: ")
    assert ended.reason.endswith("; done")
    await world.finish(fine, 1.0)
    assert await status(world, group.id) is GroupStatus.COMPLETE


async def test_a_version_is_never_the_number_of_other_weights(world: World) -> None:
    """Not even of those that engines were only asked to load, and that may have sampled before the push failed."""
    policies = world.ledger.policies
    for _ in range(2):
        await policies.set_version("policy", 5)
    with pytest.raises(LedgerError, match="can't go to version 3: numbers only grow, and it is at 5"):
        await policies.set_version("policy", 3)
    first = await world.ledger.trainers.rewind("trainer", Rewind(5, {"policy": 5}, "run"))
    owner = BeginUpdate(trainer="trainer", incarnation=first.incarnation)
    await policies.assign_version("policy", 6, "digest", owner)  # and the push fails
    for _ in range(2):  # the reply was lost, the request is sent again
        rewound = await world.ledger.trainers.rewind("trainer", Rewind(3, {"policy": 3}, "run"))
        assert rewound.versions == {"policy": 7}
    for version in (3, 4, 6):
        with pytest.raises(LedgerError, match="it is at 5, with all up to 6 abandoned; push as the number that rewind"):
            await policies.set_version("policy", version)
    await policies.set_version("policy", 7)
    assert (await world.ledger.trainers.rewind("trainer", Rewind(3, {"policy": 7}, "run"))).versions == {"policy": 7}
    assert (await world.ledger.trainers.rewind("trainer", Rewind(3, {"policy": 9}, "run"))).versions == {"policy": 9}
    with pytest.raises(UnknownPolicy):
        await world.ledger.trainers.rewind("trainer", Rewind(3, {"nobody": 0}, "run"))


async def test_tokens_of_abandoned_weights_are_never_fresh(world: World) -> None:
    """Version 8 is restored as 5; a rollout that was under way meanwhile has tokens of all of them."""
    await world.ledger.policies.set_version("policy", 8)
    kept, abandoned, across = [await world.complete(1, *versions) for versions in ((5,), (7,), (5, 8))]
    too_old = await world.complete(1, 3)
    now = (await world.ledger.trainers.rewind("trainer", Rewind(5, {"policy": 5}, "run"))).incarnation
    for _ in range(2):  # before the restored weights are pushed, and after
        stats = await world.ledger.policies.stats("policy")
        assert (stats.staleness, stats.abandoned) == ({0: 1, 2: 1}, 2)
        await world.ledger.policies.set_version("policy", 9)
    lease = await world.ledger.trainers.lease(wants(9, max_staleness=0, incarnation=now))
    assert [(one.group.id, one.staleness) for one in lease.groups] == [(kept.id, 0)]
    assert [await status(world, one.id) for one in (abandoned, across, too_old)] == [GroupStatus.STALE] * 3
    await world.ledger.policies.set_version("policy", 10)
    old, new = [await world.complete(1, version) for version in (5, 9)]
    lease = await world.ledger.trainers.lease(wants(9, incarnation=now))
    assert [one.staleness for one in lease.groups] == [1, 1]
    now = (await world.ledger.trainers.rewind("trainer", Rewind(5, {"policy": 10}, "run"))).incarnation
    lease = await world.ledger.trainers.lease(wants(9, max_staleness=1, incarnation=now))
    assert {one.group.id for one in lease.groups} == {kept.id, old.id, new.id}


async def test_an_abandoned_checkpoint_may_be_restored_after_all(world: World) -> None:
    """Version 7 was abandoned for 5, and is taken up again: 6 is behind it, 8 and 10 are of no use."""
    await world.ledger.policies.set_version("policy", 8)
    await world.ledger.trainers.rewind("trainer", Rewind(5, {"policy": 5}, "run"))
    await world.ledger.policies.set_version("policy", 10)
    rewound = await world.ledger.trainers.rewind("trainer", Rewind(7, {"policy": 7}, "run"))
    assert rewound.versions == {"policy": 11}
    groups = {version: (await world.complete(1, version)).id for version in (5, 6, 7, 8, 10)}
    lease = await world.ledger.trainers.lease(wants(9, max_staleness=1, incarnation=rewound.incarnation))
    assert {one.group.id: one.staleness for one in lease.groups} == {groups[6]: 1, groups[7]: 0}


async def test_a_checkpoint_that_abandoned_others_may_be_restored_after_all(world: World) -> None:
    """Version 2 was abandoned for 1, which went on as 3, which was abandoned for 0 and is taken up again."""
    await world.ledger.policies.set_version("policy", 2)
    for restored, number in ((1, 3), (0, 4), (3, 5)):
        rewound = await world.ledger.trainers.rewind("trainer", Rewind(restored, {"policy": restored}, "run"))
        assert rewound.versions == {"policy": number}
        await world.ledger.policies.set_version("policy", number)
    groups = [(await world.complete(1, version)).id for version in range(5)]
    lease = await world.ledger.trainers.lease(wants(9, max_staleness=1, incarnation=rewound.incarnation))
    assert {one.group.id: one.staleness for one in lease.groups} == {groups[0]: 1, groups[1]: 0, groups[3]: 0}


async def test_a_policy_keeps_its_tokenizer(world: World) -> None:
    await world.ledger.policies.set_version("policy", 2)
    assert (await world.ledger.policies.register("policy", tokenizer_hash="abc")).version == 2
    with pytest.raises(ConfigError, match="on record with tokenizer abc"):
        await world.ledger.policies.register("policy", tokenizer_hash="def")


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


async def test_a_group_that_measures_is_never_leased(world: World) -> None:
    group = await world.complete(2, tags=("purpose=eval", "held-out"))
    assert group.status is GroupStatus.DROPPED
    assert (await world.ledger.trainers.lease(wants())).groups == ()
    assert (await world.ledger.policies.stats("policy")).outstanding == 0


async def test_zero_variance_is_counted_and_replaced_if_asked(world: World) -> None:
    kept, replaced = await world.open(2), await world.open(2, zero_variance="replace")
    for group in (kept, replaced):
        for rollout in group.rollouts:
            await world.finish(await world.start(rollout), 1.0)
    assert await status(world, kept.id) is GroupStatus.COMPLETE
    assert await status(world, replaced.id) is GroupStatus.DROPPED
    assert (await world.ledger.policies.stats("policy")).zero_variance == 2
    of_task = [group for group in await world.groups() if group.task_id == replaced.task_id]
    fresh = [group for group in of_task if group.status is GroupStatus.OPEN]
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


async def test_events_tell_what_happened_in_order(world: World) -> None:
    before = await world.ledger.events.last()
    group = await world.complete(1)
    lease = await world.ledger.trainers.lease(wants())
    await world.ledger.trainers.acknowledge(key(lease), 1)
    kinds = []
    async with asyncio.timeout(20):
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


async def test_events_are_forgotten_after_a_day_some_at_each_sweep(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "FORGOTTEN_AT_ONCE", 3)
    monkeypatch.setattr(ledger, "FORGET_EVERY_S", 0.0)
    await world.complete(1)
    world.clock.ahead += 86_401.0
    kept = await world.open(1)
    ages = []
    for _ in range(3):
        await world.ledger.sweep()
        ages.append(len(await world.ledger.events.since(0)))
    assert ages == [3, 1, 1]
    assert [event.subject for event in await world.ledger.events.since(0)] == [kept.id]
    world.clock.ahead += 86_401.0
    await world.ledger.sweep()
    assert len(await world.ledger.events.since(0)) == 1, "the last one stays: readers see that they missed none"


async def test_a_session_that_was_never_stored_does_not_stop_the_sweeper(world: World) -> None:
    """Its server died before it could store it: the session ends with its attempt like any other."""
    group = await world.open(2, deadline=1.0)
    first, second = [await world.start(rollout) for rollout in group.rollouts]
    world.unstored.add(str(first.session_id))
    async with world.ledger.sweeping(every=0.01):
        world.clock.ahead += 10
        for _ in range(500):
            await asyncio.sleep(0.02)
            if str(second.session_id) in world.closed:
                break
    assert str(second.session_id) in world.closed
    assert await status(world, group.id) is not GroupStatus.OPEN


async def test_a_defect_does_not_stop_the_sweeper(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps, third = itertools.count(1), asyncio.Event()

    async def sweep() -> None:
        if next(sweeps) == 3:
            third.set()
        raise RuntimeError("a defect")

    monkeypatch.setattr(world.ledger, "sweep", sweep)
    async with world.ledger.sweeping(every=0.01), asyncio.timeout(20):
        await third.wait()


async def test_groups_are_found_by_words_and_purpose_and_counted(world: World) -> None:
    for number, tags in enumerate([("x",), ("purpose=eval", "x"), ()]):
        task = Task(f"task-{number}%", "Count the 50% of it" if number else "Sort it")
        await world.ledger.groups.open(GroupSpec("policy", 1, task, tags), group_id=f"g{number}")

    async def found(query: GroupQuery) -> list[str]:
        rows = await world.database.query(lambda connection: group_rows(connection, query))
        counts = await world.database.query(lambda connection: group_counts(connection, query))
        assert sum(row[-1] for row in counts) == len(rows)
        return [row.group.id for row in rows]

    assert sorted(await found(GroupQuery())) == ["g0", "g1", "g2"]
    assert await found(GroupQuery(purpose="evaluation")) == ["g1"]
    assert sorted(await found(GroupQuery(purpose="training"))) == ["g0", "g2"]
    assert await found(GroupQuery(words="sort")) == ["g0"]
    assert sorted(await found(GroupQuery(words="50%"))) == ["g1", "g2"], "a sign of patterns stands for itself"
    assert await found(GroupQuery(words="TASK-1%")) == ["g1"]
    assert await found(GroupQuery(words="g2")) == ["g2"]
    assert await found(GroupQuery(status="complete")) == []
    assert len(await found(GroupQuery(sort="reward_mean", descending=False))) == 3
    assert await found(GroupQuery(policy="other", spread=True)) == []
