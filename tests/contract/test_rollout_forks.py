"""Forked rollouts in the ledger: they have a parent, and belong to its group or to one of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rolltap.errors import InvalidRequest, LedgerError, NotFound
from rolltap.ledger.groups import MAX_ROLLOUTS, GroupSpec
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.types import GroupStatus, RolloutParent, RolloutStatus, Task

from ..unit.ledger.world import World, status, wants

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_forks_join_their_parent_s_open_group_which_waits_for_them(world: World) -> None:
    group = await world.open(2)
    first, second = group.rollouts
    started = await world.start(first)
    parent = RolloutParent(first.id, "call", 3)
    forked = (await world.ledger.groups.fork(parent, 2)).rollouts
    assert [(rollout.index, rollout.parent) for rollout in forked] == [(0, None), (1, None), (2, parent), (3, parent)]
    deeper = RolloutParent(forked[2].id, "another")
    (last,) = (await world.ledger.groups.fork(deeper, 1)).rollouts[4:]
    await world.finish(started)
    for rollout in (second, *forked[2:]):
        await world.finish(await world.start(rollout))
    assert await status(world, group.id) is GroupStatus.OPEN
    await world.finish(await world.start(last))
    (leased,) = (await world.ledger.trainers.lease(wants())).groups
    assert [record.rollout.parent for record in leased.rollouts] == [None, None, parent, parent, deeper]
    with pytest.raises(LedgerError, match="while it is open"):
        await world.ledger.groups.fork(parent, 1)


async def test_the_same_fork_again_has_no_effect(world: World) -> None:
    group = await world.open(2)
    first, second = group.rollouts
    await world.start(first)
    parent = RolloutParent(first.id, "call", 3, "mine")
    made = await world.ledger.groups.fork(parent, 2)
    for again in (1, 2):
        assert await world.ledger.groups.fork(parent, 2) == made, again
    for other in (parent, replace(parent, at=None), replace(parent, rollout_id=second.id)):
        with pytest.raises(LedgerError, match="fork mine of the group is another one"):
            await world.ledger.groups.fork(other, 1)
    assert len((await world.ledger.groups.fork(replace(parent, fork="other"), 2)).rollouts) == 6
    await world.ledger.groups.cancel(group.id)
    assert len((await world.ledger.groups.fork(parent, 2)).rollouts) == 6


async def test_a_group_with_enough_usable_rollouts_counts_its_forks(world: World) -> None:
    group = await world.open(2, usable=3, spares=2)
    first, second = [await world.start(rollout) for rollout in group.rollouts]
    await world.finish(first)
    _, _, spare, fork = (await world.ledger.groups.fork(RolloutParent(first.id, "call"), 1)).rollouts
    assert (spare.parent, fork.parent) == (None, RolloutParent(first.id, "call"))
    await world.finish(second)
    await world.finish(await world.start(fork))
    done = await world.ledger.groups.get(group.id)
    assert (done.status, done.rollouts[2].status) == (GroupStatus.COMPLETE, RolloutStatus.CANCELLED)


async def test_all_rollouts_of_a_task_with_a_fork_have_its_parent_also_spares(world: World) -> None:
    task = Task("t", "go on", {"fork": {"rollout": "r", "call": "c", "at": 0}})
    group = await world.ledger.groups.open(GroupSpec("policy", 2, task))
    assert {rollout.parent for rollout in group.rollouts} == {RolloutParent("r", "c", 0)}


@pytest.mark.parametrize("fork", [{}, {"rollout": "r"}, {"rollout": "r", "call": "c", "at": -1}, "r", {"call": 1}])
async def test_a_fork_that_names_no_call_is_refused_at_once(world: World, fork: object) -> None:
    task = Task("t", "go on", {"fork": fork})
    with pytest.raises(InvalidRequest, match="task 't': fork: "):
        GroupSpec("policy", 2, task)
    with pytest.raises(InvalidRequest, match="task 't': fork: "):
        SubmissionSpec("policy", 2, (task,))


async def test_forks_need_a_rollout_and_room(world: World) -> None:
    with pytest.raises(NotFound, match="no rollout 'nope'"):
        await world.ledger.groups.fork(RolloutParent("nope", "call"), 1)
    group = await world.open(2)
    for n in (0, MAX_ROLLOUTS - 1):
        with pytest.raises(InvalidRequest, match="the group has 2 rollouts"):
            await world.ledger.groups.fork(RolloutParent(group.rollouts[0].id, "call"), n)
