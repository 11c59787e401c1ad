"""Several policies that are trained in the same rollouts, over every database: each has a group, a lease and a trainer
of its own, and the rollouts, sessions and rewards exist once."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.calllog.prune import GroupUse
from rolltap.contract.admin import NOTHING_SAMPLED, ClaimRollouts, GroupRule, NewReward
from rolltap.contract.trainer import BeginUpdate, Lease, LeaseRequest, LeavePolicy, Rewind
from rolltap.errors import LeaseLost, LedgerError, RateLimited, TrainerFenced
from rolltap.ids import new_id
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.ledger.views import group_rows, group_uses, policy_counts, rewarded_rollouts, run_state
from rolltap.types import EVALUATION, PURPOSE_TAG, Group, GroupStatus, Rollout, RolloutStatus, Scoring, Task

from ..unit.ledger.world import World, key, status

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROLES = {"solver": "a", "critic": "b", "judge": "frozen"}


def spec(n: int = 2, *, tags: tuple[str, ...] = (), **rule: Any) -> GroupSpec:
    return GroupSpec("a", n, Task(new_id(), "debate"), tags, GroupRule(**rule), 0, ROLES, ("b",))  # type: ignore[arg-type]


async def prepared(world: World) -> World:
    for name in ("a", "b", "frozen"):
        await world.ledger.policies.register(name)
    return world


async def end(world: World, rollout: Rollout, rewards: dict[str, float], **played: tuple[int, ...]) -> Rollout:
    """Plays a rollout, in which each policy samples one token of each of its versions, and rewards it by scope."""
    began = await world.play(rollout, **played)
    for scope, value in rewards.items():
        await world.ledger.rewards.append(NewReward(rollout.id, value, scope))
    return await world.finish(began, None)


async def debate(world: World, *rewards: dict[str, float], **rule: Any) -> Group:
    """A complete group: both policies sample a token of version 0 in each rollout."""
    group = await world.ledger.groups.open(spec(len(rewards), **rule))
    for rollout, given in zip(group.rollouts, rewards, strict=True):
        await end(world, rollout, given, a=(0,), b=(0,))
    return await world.ledger.groups.get(group.id)


async def lease(world: World, policy: str, **more: object) -> Lease:
    return await world.ledger.trainers.lease(LeaseRequest(f"{policy}s", policy, 8, **more))  # type: ignore[arg-type]


async def statuses(world: World, group: Group) -> dict[str, GroupStatus]:
    return {policy: await status(world, id) for policy, id in group.trains.items()}


async def test_each_policy_is_leased_its_own_segments_of_the_same_rollouts(world: World) -> None:
    await prepared(world)
    group = await debate(world, {"rollout": 1.0, "role:critic": 0.25}, {"rollout": 0.0, "role:critic": 0.75})
    assert list(group.trains) == ["a", "b"]
    assert group.trains["a"] == group.id
    leases = {policy: await lease(world, policy) for policy in ("a", "b")}
    for policy, given in leases.items():
        (leased,) = given.groups
        assert (leased.group.id, leased.group.policy) == (group.trains[policy], policy)
        assert leased.group.trains == group.trains
        assert [one.rollout.id for one in leased.rollouts] == [one.id for one in group.rollouts]
        assert {one.rollout.group_id for one in leased.rollouts} == {leased.group.id}
        for record in leased.rollouts:
            trained = {one.turns[0].call_id[-1]: one.loss_mask.any() for one in record.trajectory.segments}
            assert trained == {"a": policy == "a", "b": policy == "b"}, "the others' segments are context"
    assert [one.reward for one in leases["a"].groups[0].rollouts] == [1.0, 0.0]
    assert [one.reward for one in leases["b"].groups[0].rollouts] == [0.25, 0.75], "its role has rewards of its own"


async def test_what_one_trainer_does_is_not_the_others(world: World) -> None:
    await prepared(world)
    group = await debate(world, {"rollout": 1.0}, {"rollout": 0.0})
    given = {policy: await lease(world, policy) for policy in ("a", "b")}
    await world.ledger.trainers.acknowledge(key(given["a"]), 1)
    assert await statuses(world, group) == {"a": "acknowledged", "b": "leased"}
    await world.ledger.trainers.refuse(key(given["b"]), "not a number")
    assert await statuses(world, group) == {"a": "acknowledged", "b": "complete"}
    assert (await world.ledger.groups.get(group.trains["b"])).failures == 1
    assert (await world.ledger.groups.get(group.id)).failures == 0
    again = await lease(world, "b")
    rewound = await world.ledger.trainers.rewind("as", Rewind(0, {"a": 0}, "run"))
    assert (rewound.acknowledged, rewound.leased) == (1, 0)
    assert await statuses(world, group) == {"a": "complete", "b": "leased"}
    await world.ledger.trainers.acknowledge(key(again), 1)
    assert await statuses(world, group) == {"a": "complete", "b": "acknowledged"}
    world.clock.ahead += 1000
    assert (await world.ledger.trainers.lease(LeaseRequest("as", "a", 1, incarnation=rewound.incarnation))).groups


async def test_a_policys_owner_can_not_touch_the_others_group(world: World) -> None:
    await prepared(world)
    await debate(world, {"rollout": 1.0}, {"rollout": 0.0})
    for policy in ("a", "b"):
        await world.ledger.trainers.rewind(f"{policy}s", Rewind(0, {policy: 0}, policy))
    with pytest.raises(TrainerFenced, match="'b' is trained by 'bs'"):
        await world.ledger.trainers.lease(LeaseRequest("as", "b", 1, incarnation=1))


async def test_a_group_dies_and_is_revived_for_one_policy(world: World) -> None:
    await prepared(world)
    group = await debate(world, {"rollout": 1.0}, {"rollout": 0.0})
    for _ in range(3):
        await world.ledger.trainers.refuse(key(await lease(world, "b")), "no")
    assert await statuses(world, group) == {"a": "complete", "b": "dead"}
    (letter,) = await world.ledger.groups.dead_letters()
    assert (letter.group.id, letter.group.policy, letter.reason) == (group.trains["b"], "b", "no")
    assert len(letter.group.rollouts) == 2
    await world.ledger.groups.revive(group.trains["b"])
    assert (await lease(world, "b")).groups


async def test_staleness_is_by_each_policys_own_calls(world: World) -> None:
    await prepared(world)
    group = await world.ledger.groups.open(spec(1))
    await end(world, group.rollouts[0], {"rollout": 1.0}, a=(3, 4), b=(0, 1))
    group = await world.ledger.groups.get(group.id)
    for policy, version in (("a", 4), ("b", 2)):
        await world.ledger.policies.set_version(policy, version)
    (of_a,) = (await lease(world, "a", max_staleness=1)).groups
    assert (of_a.oldest_version, of_a.newest_version, of_a.staleness) == (3, 4, 1)
    assert (await lease(world, "b", max_staleness=1)).groups == ()
    assert await statuses(world, group) == {"a": "leased", "b": "stale"}


async def test_a_rollout_in_which_a_policy_sampled_nothing_is_left_out_for_it_alone(world: World) -> None:
    await prepared(world)
    group = await world.ledger.groups.open(spec(3))
    first, second, third = group.rollouts
    await end(world, first, {"rollout": 1.0}, a=(0,), b=(0,))
    await end(world, second, {"rollout": 0.0}, a=(0,))
    ended = await end(world, third, {"rollout": 0.5})
    assert (ended.status, ended.scoring) == (RolloutStatus.FAILED, Scoring.UNSCORABLE)
    scoring = {}
    for policy in ("a", "b"):
        (leased,) = (await lease(world, policy)).groups
        scoring[policy] = [record.rollout.scoring for record in leased.rollouts]
    left_out = Scoring.UNSCORABLE
    assert scoring == {"a": [Scoring.SCORED, Scoring.SCORED, left_out], "b": [Scoring.SCORED, left_out, left_out]}
    assert leased.rollouts[1].rollout.reason == NOTHING_SAMPLED
    rows = await world.database.query(group_rows)
    assert {each.group.policy: each.row.reward_mean for each in rows} == {"a": 0.5, "b": 1.0}
    counts = {policy: (await world.ledger.policies.stats(policy)).unanswered for policy in ("a", "b")}
    assert counts == {"a": 1, "b": 2}


async def test_a_group_without_tokens_of_a_policy_is_dropped_for_it_alone(world: World) -> None:
    await prepared(world)
    group = await world.ledger.groups.open(spec(1))
    await end(world, group.rollouts[0], {"rollout": 1.0}, a=(0,))
    group = await world.ledger.groups.get(group.id)
    assert (await lease(world, "b")).groups == ()
    assert await statuses(world, group) == {"a": "complete", "b": "dropped"}
    assert (await world.ledger.policies.stats("b")).untrained == 1
    assert (await lease(world, "a")).groups


async def test_equal_rewards_drop_a_group_for_one_policy_and_replace_it_only_for_all(world: World) -> None:
    await prepared(world)
    critic = [{"rollout": 1.0, "role:critic": 0.0}, {"rollout": 1.0, "role:critic": 1.0}]
    group = await debate(world, *critic, zero_variance="replace")
    assert await statuses(world, group) == {"a": "dropped", "b": "complete"}
    assert not [one for one in await world.groups() if one.status is GroupStatus.OPEN]
    await debate(world, {"rollout": 1.0}, {"rollout": 1.0}, zero_variance="replace")
    opened = [one for one in await world.groups() if one.status is GroupStatus.OPEN]
    assert sorted(one.policy for one in opened) == ["a", "b"]
    assert {len(one.rollouts) for one in opened} == {2}
    assert len({rollout.id for one in opened for rollout in one.rollouts}) == 2


@pytest.mark.parametrize("by", ["a", "b"])
async def test_all_groups_of_the_rollouts_are_cancelled_together(world: World, by: str) -> None:
    await prepared(world)
    group = await world.ledger.groups.open(spec(2))
    await world.ledger.groups.cancel(group.trains[by])
    assert await statuses(world, group) == {"a": "dropped", "b": "dropped"}
    rollouts = (await world.ledger.groups.get(group.trains["b"])).rollouts
    assert {one.status for one in rollouts} == {RolloutStatus.CANCELLED}


async def test_evaluations_are_trained_for_nobody(world: World) -> None:
    await prepared(world)
    group = await world.ledger.groups.open(spec(1, tags=(f"{PURPOSE_TAG}={EVALUATION}",)))
    await end(world, group.rollouts[0], {"rollout": 1.0}, a=(0,), b=(0,))
    assert set((await statuses(world, group)).values()) == {GroupStatus.DROPPED}


async def test_a_group_is_opened_once_however_often_it_is_asked_for(world: World) -> None:
    await prepared(world)
    asked = spec(2)
    first = await world.ledger.groups.open(asked, group_id="g")
    assert await world.ledger.groups.open(asked, group_id="g") == first
    other = GroupSpec("a", 2, asked.task, roles=ROLES)
    with pytest.raises(LedgerError, match="another policies"):
        await world.ledger.groups.open(other, group_id="g")


async def test_room_is_that_of_all_trainers(world: World) -> None:
    await prepared(world)
    submission = SubmissionSpec("a", 1, tuple(Task(f"t{n}", "debate") for n in range(4)), roles=ROLES, also=("b",))
    for policy, batch in (("a", 3), ("b", 1)):
        await lease(world, policy, max_staleness=0, batch=batch)
    await world.ledger.submissions.submit(submission, submission_id="s")
    given = await world.ledger.nodes.claim("node", ClaimRollouts(8))
    assert len(given) == 1, "b's trainer takes one group"
    told = await world.ledger.submissions.get("s")
    assert (told.also, told.queued, told.tasks) == (("b",), 3, 4)
    assert told.waits_for.startswith("room at the trainers of b: bs")
    with pytest.raises(RateLimited, match="policy 'b'"):
        await world.ledger.groups.open(spec())


async def test_the_views_know_them(world: World) -> None:
    await prepared(world)
    group = await debate(world, {"rollout": 1.0}, {"rollout": 0.0})
    sessions = [rollout.session_id or "" for rollout in group.rollouts]
    counts = {one.name: one for one in await world.database.query(policy_counts)}
    for policy in ("a", "b"):
        assert (counts[policy].groups, counts[policy].rollouts) == ({"complete": 1}, {"succeeded": 2})
        stats = await world.ledger.policies.stats(policy)
        assert (stats.groups, stats.rollouts) == ({"complete": 1}, {"succeeded": 2})
        rows = await world.database.query(lambda opened, name=policy: rewarded_rollouts(opened, name, 0, 0))
        assert {row.group_id for row in rows} == {group.trains[policy]}
        assert len(rows) == 2
        state = await world.database.query(lambda opened, name=policy: run_state(opened, name))
        assert (state.waiting_tasks, state.waiting_rollouts) == (0, 0)
    uses = []
    for policy in ("b", "a"):
        await world.ledger.trainers.acknowledge(key(await lease(world, policy)), 1)
        uses.append(await world.database.query(lambda opened: group_uses(opened, sessions)))
    assert {use for use, _ in uses[0].values()} == {GroupUse.WAITING}, "one policy has still to train them"
    assert {use for use, _ in uses[1].values()} == {GroupUse.ACKNOWLEDGED}


async def test_a_barrier_holds_new_rollouts_until_all_have_stepped_and_serve(world: World) -> None:
    await prepared(world)
    barred = World(world.database, clock=world.clock, barrier=True)
    submission = SubmissionSpec("a", 1, tuple(Task(f"t{n}", "debate") for n in range(9)), roles=ROLES, also=("b",))
    await barred.ledger.submissions.submit(submission, submission_id="s")
    by: dict[str, BeginUpdate] = {}
    for policy in ("a", "b"):
        rewound = await barred.ledger.trainers.rewind(f"{policy}s", Rewind(0, {policy: 0}, policy))
        by[policy] = BeginUpdate(trainer=f"{policy}s", incarnation=rewound.incarnation)
        await lease(barred, policy, max_staleness=3, batch=1, incarnation=1)

    async def claimed() -> int:
        """Claims what there is, and plays it."""
        given = await barred.ledger.nodes.claim("node", ClaimRollouts(1))
        for one in given:
            group = await barred.ledger.rollouts.group_of(one.rollout_id)
            began = (await barred.ledger.rollouts.start(one.rollout_id, new_id(), node_token=one.token)).rollout
            barred.played[began.session_id or ""] = {"a": (0,), "b": (0,)}
            await barred.finish(began, 1.0, node_token=one.token)
            assert len(group.trains) == 2
        return len(given)

    async def acknowledge(policy: str, step: int) -> None:
        request = LeaseRequest(f"{policy}s", policy, 1, max_staleness=3, batch=1, incarnation=1)
        given = await barred.ledger.trainers.lease(request)
        await barred.ledger.trainers.acknowledge(key(given, 1), step)

    async def push(policy: str, version: int) -> None:
        await barred.ledger.policies.assign_version(policy, version, f"{policy}{version}", by[policy])
        await barred.ledger.policies.set_version(policy, version)

    assert await claimed() == 1
    assert await claimed() == 1, "nobody has stepped yet"
    await acknowledge("a", 1)
    await push("a", 1)
    assert await claimed() == 0, "b has not stepped"
    assert "trainer of b" in (await barred.ledger.submissions.get("s")).waits_for
    with pytest.raises(RateLimited, match="barrier"):
        await barred.ledger.groups.open(spec())
    await barred.ledger.groups.open(GroupSpec("a", 1, Task("alone", "")))  # a group of one policy waits for nobody
    await acknowledge("b", 1)
    assert await claimed() == 0, "b's new weights are not served"
    await push("b", 1)
    assert await claimed() == 1
    barred.clock.ahead += 601
    await acknowledge("a", 2)
    await push("a", 2)
    assert await claimed() == 1, "b's trainer has been silent for too long"


async def test_a_late_acknowledgement_of_a_shared_group_is_lost(world: World) -> None:
    await prepared(world)
    group = await debate(world, {"rollout": 1.0}, {"rollout": 0.0})
    old = await lease(world, "b", ttl=60)
    await lease(world, "a", ttl=600)
    world.clock.ahead += 61
    with pytest.raises(LeaseLost, match="expired"):
        await world.ledger.trainers.acknowledge(key(old), 1)
    await world.ledger.sweep()
    assert await statuses(world, group) == {"a": "leased", "b": "complete"}


async def test_rollouts_do_not_wait_for_a_trainer_that_has_left(world: World) -> None:
    await prepared(world)
    rewound = await world.ledger.trainers.rewind("bs", Rewind(0, {"b": 0}, "b"))
    await lease(world, "b", max_staleness=0, batch=1, incarnation=rewound.incarnation)
    await world.ledger.groups.open(spec())
    with pytest.raises(RateLimited, match="policy 'b'"):
        await world.ledger.groups.open(spec())
    with pytest.raises(TrainerFenced):
        await world.ledger.policies.leave("b", LeavePolicy(trainer="bs", incarnation=0))
    await world.ledger.policies.leave("b", LeavePolicy(trainer="bs", incarnation=rewound.incarnation))
    await world.ledger.groups.open(spec())
    assert (await world.ledger.policies.get("b")).owner == "bs"
