"""What a trainer sets for rollouts to come, and what it does to the queue, over every database."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import pytest_asyncio
import sqlalchemy as sa

from rolltap.calllog.database import Database
from rolltap.contract.admin import ClaimRollouts, FinishRollout, GroupRule, NewReward
from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import BeginUpdate, LeaseRequest, Rewind
from rolltap.errors import TrainerFenced, UnknownPolicy
from rolltap.ids import new_id
from rolltap.ledger.rollouts import no_late_peers
from rolltap.ledger.schema import groups
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.types import RolloutStatus, Task

from ..unit.ledger.world import World, empty

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVALUATION_TAG = "purpose=eval"


@pytest_asyncio.fixture(loop_scope="module")
async def world(database: Database) -> World:
    await empty(database)
    world = World(database)
    for name in ("policy", "other"):
        await world.ledger.policies.register(name)
    return world


def tasks(*named: tuple[str, tuple[str, ...]]) -> tuple[Task, ...]:
    return tuple(Task(name, "do it", tags=tags) for name, tags in named)


async def submit(world: World, policy: str, n: int, *named: tuple[str, tuple[str, ...]], **more: object) -> str:
    spec = SubmissionSpec(policy, n, tasks(*named), **more)  # type: ignore[arg-type]
    return (await world.ledger.submissions.submit(spec)).id


async def claim(world: World, capacity: int) -> list[str]:
    """The tasks of the rollouts that a node claims."""
    return [one.task.id for one in await world.ledger.nodes.claim("node", ClaimRollouts(capacity))]


async def control(world: World, policy: str = "policy", **values: object) -> None:
    await world.ledger.controls.set(policy, RolloutControl(**values))  # type: ignore[arg-type]


async def group_of(world: World, task: str) -> Any:
    """The row of the task's group."""
    (row,) = await world.ledger._uow.select(sa.select(groups).where(groups.c.task_id == task))
    return row


async def test_a_control_replaces_the_one_before_and_is_noted(world: World) -> None:
    await control(world, max_turns=4, temperature=0.7, n=3, priority=-2, curriculum={"easy": 2.0})
    assert await world.ledger.controls.of("policy") == RolloutControl(4, 0.7, 3, -2, {"easy": 2.0})
    await control(world, n=5)
    assert await world.ledger.controls.of("policy") == RolloutControl(n=5)
    assert await world.ledger.controls.of("other") == RolloutControl()
    noted = [event for event in await world.ledger.events.since(0) if event.kind == "control_set"]
    assert [event.subject for event in noted] == ["policy"] * 2
    assert noted[0].data["curriculum"] == {"easy": 2.0}
    with pytest.raises(UnknownPolicy):
        await control(world, "nothing", n=1)


async def test_a_control_ends_when_another_run_takes_the_policy(world: World) -> None:
    async def begun(run: str) -> BeginUpdate:
        restored = await world.ledger.trainers.rewind("trainer", Rewind(0, {"policy": 0}, run, take_over=True))
        return BeginUpdate(trainer="trainer", incarnation=restored.incarnation)

    await control(world, n=7)  # of the admin plane: it stands
    first = await begun("first")
    assert await world.ledger.controls.with_run("policy") == (RolloutControl(n=7), None)
    await world.ledger.controls.set("policy", RolloutControl(max_turns=1), first)
    await begun("first")  # it goes on
    assert await world.ledger.controls.with_run("policy") == (RolloutControl(max_turns=1), "first")
    await begun("second")
    assert await world.ledger.controls.with_run("policy") == (RolloutControl(), None)
    assert "control_ended" in [event.kind for event in await world.ledger.events.since(0)]


async def test_a_killed_runs_control_ends_and_is_there_again_if_the_run_goes_on(world: World) -> None:
    """Nobody says that it ended. It would bind all rollouts to come, of an evaluation or an export, too."""
    silence = world.ledger.settings.trainer_silence
    restored = await world.ledger.trainers.rewind("trainer", Rewind(0, {"policy": 0}, "run"))
    by = BeginUpdate(trainer="trainer", incarnation=restored.incarnation)
    await world.ledger.controls.set("policy", RolloutControl(n=7, curriculum={"hard": 1.0}), by)
    await submit(world, "policy", 2, ("easy", ("easy",)), ("hard", ("hard",)))
    world.clock.ahead += silence / 2
    assert await claim(world, 1) == ["hard"]
    assert await world.ledger.controls.with_run("policy") == (RolloutControl(n=7, curriculum={"hard": 1.0}), "run")
    world.clock.ahead += silence
    assert await world.ledger.controls.with_run("policy") == (RolloutControl(), None)
    assert "easy" in await claim(world, 20)
    assert (await group_of(world, "easy")).n == 2
    await world.ledger.trainers.lease(LeaseRequest("trainer", "policy", 1, incarnation=restored.incarnation))
    assert (await world.ledger.controls.with_run("policy"))[1] == "run"


async def test_only_the_owners_incarnation_sets_it(world: World) -> None:
    async def restored(name: str) -> BeginUpdate:
        rewind = Rewind(0, {"policy": 0}, f"run of {name}", take_over=True)
        return BeginUpdate(trainer=name, incarnation=(await world.ledger.trainers.rewind(name, rewind)).incarnation)

    early = BeginUpdate(trainer="one", incarnation=0)
    with pytest.raises(TrainerFenced, match="has no trainer yet"):
        await world.ledger.controls.set("policy", RolloutControl(n=1), early)
    zombie, again = await restored("one"), await restored("one")
    await world.ledger.controls.set("policy", RolloutControl(n=2), again)
    with pytest.raises(TrainerFenced, match="newer incarnation"):
        await world.ledger.controls.set("policy", RolloutControl(n=3), zombie)
    assert await world.ledger.controls.of("policy") == RolloutControl(n=2)
    await restored("two")
    with pytest.raises(TrainerFenced, match="is trained by 'two'"):
        await world.ledger.controls.set("policy", RolloutControl(n=4), again)
    assert await world.ledger.controls.of("policy") == RolloutControl()


async def test_groups_opened_from_now_on_have_the_size_that_was_set(world: World) -> None:
    await submit(world, "policy", 2, ("a", ()), ("b", ()))
    assert await claim(world, 2) == ["a", "a"]
    await control(world, n=3)
    assert await claim(world, 9) == ["b"] * 3
    assert ((await group_of(world, "a")).n, (await group_of(world, "b")).n) == (2, 3)
    await submit(world, "policy", 4, ("ruled", ()), rule=GroupRule(usable=4))
    await submit(world, "policy", 1, ("measured", ()), tags=(EVALUATION_TAG,))
    await submit(world, "other", 1, ("foreign", ()))
    assert sorted(await claim(world, 9)) == ["foreign", "measured"] + ["ruled"] * 4


async def test_priority_moves_the_policys_tasks_among_all(world: World) -> None:
    await submit(world, "other", 1, ("foreign", ()), ("foreign too", ()))
    await submit(world, "policy", 1, ("own", ()))
    await submit(world, "policy", 1, ("measured", ()), tags=(EVALUATION_TAG,))
    await control(world, priority=5)
    assert await claim(world, 1) == ["own"]
    assert (await group_of(world, "own")).priority == 5
    assert await claim(world, 9) == ["foreign", "foreign too", "measured"]


async def test_a_priority_fits_into_every_store(world: World) -> None:
    for sign in (1, -1):
        await control(world, priority=sign * 1_000_000)
        await submit(world, "policy", 1, (f"far {sign}", ()), priority=sign * (2**31 - 2))
        assert await claim(world, 1) == [f"far {sign}"]
        assert (await group_of(world, f"far {sign}")).priority == sign * (2**31 - 1)


async def test_a_curriculum_holds_back_what_it_does_not_name(world: World) -> None:
    id = await submit(world, "policy", 1, ("a", ("hard",)), ("b", ("easy", "long")), ("c", ()), ("d", ("easy",)))
    await submit(world, "policy", 1, ("measured", ("hard",)), tags=(EVALUATION_TAG,))
    await submit(world, "other", 1, ("foreign", ("hard",)))
    await control(world, curriculum={"easy": 1.0})
    assert await claim(world, 9) == ["b", "d", "measured", "foreign"]
    assert await claim(world, 9) == []
    assert await world.ledger.nodes.has_work()
    waits = (await world.ledger.submissions.get(id)).waits_for
    assert waits == "the curriculum of policy policy: it names none of the 2 queued tasks"
    await control(world, curriculum={"c": 3.0})
    assert await claim(world, 9) == ["c"]
    await control(world)
    assert await claim(world, 9) == ["a"]


async def test_unknown_tags_hold_everything_back_and_are_said(world: World) -> None:
    id = await submit(world, "policy", 1, ("a", ("easy",)))
    await control(world, curriculum={"esay": 1.0, "' OR 1=1 --": 1.0, "%": 1.0, '"easy"': 1.0})
    assert await claim(world, 9) == []
    assert "it names none of the 1 queued task" in (await world.ledger.submissions.get(id)).waits_for
    await control(world, curriculum={"esay": 1.0, "*": 1.0})
    assert await claim(world, 9) == ["a"]


async def test_names_are_drawn_by_their_weights(world: World) -> None:
    named = [(f"{tag}{number}", (tag,)) for number in range(60) for tag in ("easy", "hard", "odd")]
    await submit(world, "policy", 1, *named)
    await control(world, curriculum={"hard": 3.0, "easy": 1.0, "*": 1e-6})
    drawn = await claim(world, 40)
    counts = Counter(task.rstrip("0123456789") for task in drawn)
    assert counts["odd"] == 0
    assert counts["hard"] > counts["easy"] > 0  # P(otherwise) < 1e-5
    for tag, count in counts.items():
        own = [task for task in drawn if task.startswith(tag)]
        assert set(own) == {f"{tag}{number}" for number in range(count)}, "the longest queued go first"


async def test_the_greatest_priority_goes_before_the_curriculum(world: World) -> None:
    await submit(world, "policy", 1, ("wanted", ("easy",)))
    await submit(world, "policy", 1, ("urgent", ("hard",)), priority=1)
    await control(world, curriculum={"easy": 1e6, "hard": 1e-6})
    assert await claim(world, 1) == ["urgent"]


async def test_room_bounds_what_a_curriculum_opens(world: World) -> None:
    await world.ledger.trainers.lease(LeaseRequest("trainer", "policy", 1, max_staleness=0))  # room for one group
    await submit(world, "policy", 1, ("a", ("easy",)), ("b", ("easy",)))
    await control(world, curriculum={"easy": 1.0})
    assert await claim(world, 9) == ["a"]


async def test_a_submission_counts_the_rollouts_that_ended_late(world: World) -> None:
    async def late_peers(began: float) -> list[str]:
        return ["a-proxy"]

    id = await submit(world, "policy", 2, ("a", ()))
    claimed = await world.ledger.nodes.claim("node", ClaimRollouts(2))
    for one, late in zip(claimed, (late_peers, no_late_peers), strict=True):
        world.ledger.rollouts._late_peers = late
        started = await world.ledger.rollouts.start(one.rollout_id, new_id(), node_token=one.token)
        await world.ledger.rewards.append(NewReward(one.rollout_id, 1.0))
        end = FinishRollout(RolloutStatus.SUCCEEDED, started.rollout.attempt, node_token=one.token)
        await world.ledger.rollouts.finish(one.rollout_id, end)
    assert (await world.ledger.submissions.get(id)).late == 1
