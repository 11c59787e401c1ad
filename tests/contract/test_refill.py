"""An attempt that fails for the infrastructure is made again, over every database; its siblings stay as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rolltap.contract.admin import ClaimRollouts, FinishRollout, NewReward
from rolltap.errors import LedgerError
from rolltap.ids import new_id
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.types import Cause, GroupStatus, Rollout, RolloutStatus, Scoring, Task

from ..unit.ledger.world import World, wants

pytestmark = pytest.mark.asyncio(loop_scope="module")

BROKEN: dict[str, Any] = {"status": RolloutStatus.FAILED, "cause": Cause.INFRASTRUCTURE, "reason": "the disk is full"}


async def fail(world: World, rollout: Rollout, **ending: Any) -> Rollout:
    return await world.finish(await world.start(rollout), None, **{**BROKEN, **ending})


async def test_one_new_attempt_is_made_and_the_siblings_stay(world: World) -> None:
    group = await world.open(3)
    siblings = [await world.finish(await world.start(rollout), 1.0) for rollout in group.rollouts[:2]]
    began = await world.start(group.rollouts[2])
    again = await world.finish(began, None, **BROKEN)
    assert (again.status, again.attempt, again.session_id) == (RolloutStatus.PENDING, 2, None)
    assert again.reason == "the disk is full"
    assert began.session_id in world.closed
    assert (await world.ledger.groups.get(group.id)).status is GroupStatus.OPEN
    second = await world.finish(await world.start(again), 0.0)
    ended = await world.ledger.groups.get(group.id)
    assert ended.status is GroupStatus.COMPLETE
    assert list(ended.rollouts) == [*siblings, second]
    assert (second.attempt, second.scoring) == (2, Scoring.SCORED)
    (leased,) = (await world.ledger.trainers.lease(wants())).groups
    assert [record.reward for record in leased.rollouts] == [1.0, 1.0, 0.0]
    kinds = [event.kind for event in await world.ledger.events.since(0)]
    assert kinds.count("rollout_returned") == 1
    assert kinds.count("rollout_finished") == 3


@pytest.mark.parametrize("began_again", [False, True])
async def test_a_zombie_of_the_failed_attempt_changes_nothing(world: World, began_again: bool) -> None:
    group = await world.open(1)
    zombie = await world.start(group.rollouts[0])
    rollout = await world.finish(zombie, None, **BROKEN)
    if began_again:
        rollout = await world.start(rollout)
    before = await world.ledger.groups.get(group.id)
    for status in (RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED):
        with pytest.raises(LedgerError, match="is at attempt 2; attempt 1 can't end it"):
            await world.ledger.rollouts.finish(zombie.id, FinishRollout(status, zombie.attempt))
    with pytest.raises(LedgerError, match="is at attempt 2; attempt 1 can't end it"):
        await world.finish(zombie, None, **BROKEN)
    with pytest.raises(LedgerError, match="attempt 2"):
        await world.ledger.rewards.append(NewReward(zombie.id, 9.0, attempt=1))
    if not began_again:
        with pytest.raises(LedgerError, match="waits for attempt 2 to begin"):
            await world.ledger.rewards.append(NewReward(zombie.id, 9.0))
    assert await world.ledger.groups.get(group.id) == before
    await world.finish(rollout if began_again else await world.start(rollout), 0.5)
    assert (await world.ledger.groups.get(group.id)).rollouts[0].rewards[0].value == 0.5


async def test_two_reports_of_one_failure_make_one_attempt(world: World) -> None:
    began = await world.start((await world.open(1)).rollouts[0])
    ending = FinishRollout(RolloutStatus.FAILED, began.attempt, cause=Cause.INFRASTRUCTURE)
    reports = (world.ledger.rollouts.finish(began.id, ending) for _ in range(4))
    outcomes = await asyncio.gather(*reports, return_exceptions=True)
    assert sum(isinstance(outcome, LedgerError) for outcome in outcomes) == 3
    assert (await world.ledger.rollouts.get(began.id)).attempt == 2


@pytest.mark.parametrize(
    "ending",
    [
        {"cause": Cause.AGENT},
        {"cause": Cause.EVALUATION},
        {"status": RolloutStatus.TIMED_OUT, "cause": Cause.AGENT},
        {"status": RolloutStatus.LOST},
        {"scoring": Scoring.MASKED},
    ],
)
async def test_what_is_not_the_infrastructures_doing_or_is_said_to_count_stays(
    world: World, ending: dict[str, Any]
) -> None:
    ended = await fail(world, (await world.open(1)).rollouts[0], **ending)
    assert ended.status.terminal
    assert ended.attempt == 1


async def test_what_never_began_is_tried_again_too_and_the_number_is_bounded(world: World) -> None:
    """The workspace could not be made, so there was no session."""
    rollout = (await world.open(2)).rollouts[0]
    for failure in range(1, 4):
        ending = FinishRollout(RolloutStatus.TIMED_OUT, rollout.attempt, "too slow", cause=Cause.INFRASTRUCTURE)
        rollout = await world.ledger.rollouts.finish(rollout.id, ending)
        assert (rollout.status, rollout.attempt) == (RolloutStatus.PENDING, failure)
        with pytest.raises(LedgerError, match=f"is at attempt {failure}"):
            await world.ledger.rollouts.finish(rollout.id, ending)
    ending = FinishRollout(RolloutStatus.TIMED_OUT, rollout.attempt, "too slow", cause=Cause.INFRASTRUCTURE)
    ended = await world.ledger.rollouts.finish(rollout.id, ending)
    assert (ended.status, ended.scoring) == (RolloutStatus.TIMED_OUT, Scoring.UNSCORABLE)
    assert await world.ledger.rollouts.finish(rollout.id, ending) == ended


async def test_a_refilled_rollout_is_taken_by_any_node(world: World) -> None:
    spec = SubmissionSpec("policy", 1, (Task("t", "do it"),))
    await world.ledger.submissions.submit(spec, submission_id="s")
    (given,) = await world.ledger.nodes.claim("one", ClaimRollouts(1, 15.0))
    began = (await world.ledger.rollouts.start(given.rollout_id, new_id(), node_token=given.token)).rollout
    waiting = asyncio.create_task(world.ledger.nodes.claim("two", ClaimRollouts(1, 15.0, wait=10.0)))
    await asyncio.sleep(0)
    await world.ledger.rollouts.finish(
        began.id, FinishRollout(RolloutStatus.FAILED, 1, node_token=given.token, cause=Cause.INFRASTRUCTURE)
    )
    (again,) = await asyncio.wait_for(waiting, 20)
    assert (again.rollout_id, again.token == given.token) == (given.rollout_id, False)
    assert await world.ledger.nodes.heartbeat([given.token], 15.0) == []
    session = new_id()
    world.versions[session] = (0,)
    second = (await world.ledger.rollouts.start(began.id, session, node_token=again.token)).rollout
    assert second.attempt == 2
    await world.ledger.rewards.append(NewReward(began.id, 1.0, attempt=2))
    await world.ledger.rollouts.finish(began.id, FinishRollout(RolloutStatus.SUCCEEDED, 2, node_token=again.token))
    assert (await world.ledger.submissions.get("s")).rollouts == {"succeeded": 1}


async def test_a_spare_is_opened_only_when_the_attempts_are_used_up(world: World) -> None:
    group = await world.open(1, usable=1, spares=1)
    for _ in range(3):
        await fail(world, group.rollouts[0])
        assert len((await world.ledger.groups.get(group.id)).rollouts) == 1
    await fail(world, group.rollouts[0])
    assert len((await world.ledger.groups.get(group.id)).rollouts) == 2


async def test_a_group_that_has_ended_or_is_late_waits_for_nobody(world: World) -> None:
    cancelled = await world.open(2)
    began = await world.start(cancelled.rollouts[0])
    await world.ledger.groups.cancel(cancelled.id)
    with pytest.raises(LedgerError, match="has ended as cancelled"):
        await world.finish(began, None, **BROKEN)
    late = await world.open(2, deadline=60.0, late="partial")
    await world.finish(await world.start(late.rollouts[0]), 1.0)
    await fail(world, late.rollouts[1])
    world.clock.ahead = 61.0
    await world.ledger.sweep()
    ended = await world.ledger.groups.get(late.id)
    assert (ended.status, ended.rollouts[1].status) == (GroupStatus.COMPLETE, RolloutStatus.CANCELLED)
