"""A submission that comes in parts is the one that would have come whole, when the last part came: whatever parts are
lost, repeated or exchanged, whoever else uses its name, over every database."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.contract.admin import ClaimRollouts, SubmitTasks
from rolltap.contract.base import MAX_BODY, values_of
from rolltap.errors import LedgerError, NotFound
from rolltap.ledger.submissions import SubmissionSpec
from rolltap.types import Task

from ..unit.ledger.world import StillClock, World, empty
from .ledger_trainers import Runner

N = 2
SHARED = Task("shared", "do it")


class Client:
    """Someone who submits `content` under the name `id`, cut at some places."""

    def __init__(self, id: str, content: Sequence[Task], *cuts: int) -> None:
        self.id, self.content = id, content
        self.slices = [slice(*both) for both in pairwise((0, *cuts, len(content)))]

    def part(self, number: int) -> SubmissionSpec:
        part = self.slices[number % len(self.slices)]
        return SubmissionSpec("policy", N, tuple(self.content[part]), first=part.start, total=len(self.content))


def tasks(name: str, count: int) -> list[Task]:
    return [*(Task(f"{name}{number}", "do it") for number in range(count - 1)), SHARED]


LONG, SHORT = tasks("long", 5), tasks("short", 3)
CLIENTS = (
    Client("a", LONG, 2, 3),
    Client("a", LONG, 1),
    Client("a", [*LONG[:3], Task("other", "do it"), SHARED], 2),
    Client("a", LONG[:4], 2),
    Client("b", SHORT, 1, 2),
    Client("c", tasks("whole", 2)),
)
CLAIM = len(CLIENTS)
STEPS = st.lists(st.tuples(st.integers(0, CLAIM), st.integers(0, 2)), max_size=24)


class Model:
    """A ledger on which a submission comes whole, or does not come."""

    def __init__(self) -> None:
        self.arriving: dict[str, list[Task | None]] = {}
        self.whole: dict[str, list[Task | None]] = {}
        self.queue: list[Task | None] = []

    def submit(self, client: Client, spec: SubmissionSpec) -> bool:
        """Whether it is taken."""
        nothing: list[Task | None] = [None] * spec.of
        known = self.whole.get(client.id) or self.arriving.get(client.id) or nothing
        part = slice(spec.first, spec.first + len(spec.tasks))
        if len(known) != spec.of or any(
            task not in (None, own) for task, own in zip(known[part], spec.tasks, strict=True)
        ):
            return False
        if client.id not in self.whole:
            self.arriving[client.id] = known
            known[part] = spec.tasks
            if None not in known:
                self.whole[client.id] = self.arriving.pop(client.id)
                self.queue += known
        return True


async def submit(world: World, model: Model, client: Client, number: int) -> bool:
    spec = client.part(number)
    taken = model.submit(client, spec)
    world.clock.ahead += 1
    submissions = world.ledger.submissions
    try:
        told = await submissions.submit(spec, submission_id=client.id)
    except LedgerError:
        assert not taken
        return False
    assert taken
    if client.id in model.whole:
        assert told.tasks == len(client.content)
        assert (await submissions.get(client.id)).tasks == len(client.content)
    else:
        assert told.tasks == len(client.content) - model.arriving[client.id].count(None)
        assert "of its tasks" in told.waits_for
        with pytest.raises(NotFound, match="is not queued"):
            await submissions.get(client.id)
    return True


async def claim(world: World, model: Model) -> bool:
    """The rollouts of one group, which are those of the next task of what has come whole."""
    claimed = await world.ledger.nodes.claim("node", ClaimRollouts(N, 1e4))
    due, model.queue = model.queue[:1], model.queue[1:]
    assert [one.task for one in claimed] == due * N
    return bool(claimed)


async def carry_out(world: World, steps: Sequence[tuple[int, int]]) -> None:
    await world.ledger.policies.register("policy")
    model = Model()
    for who, number in steps:
        if who == CLAIM:
            await claim(world, model)
        else:
            await submit(world, model, CLIENTS[who], number)
    for client in CLIENTS:  # each begins anew, until it is refused
        for number in range(len(client.slices)):
            if not await submit(world, model, client, number):
                break
        else:
            assert model.whole[client.id] == client.content
    while await claim(world, model):
        pass
    for id, whole in model.whole.items():
        groups = await world.ledger.submissions.groups(id)
        assert [group.task_id for group in groups] == [task.id for task in whole if task]
        assert all(len(group.rollouts) == N for group in groups)
    await world.check_counts()


@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=9))
def test_every_part_fits_into_a_body(sizes: list[int]) -> None:
    whole = [Task(f"t{number}", "é" * (size // 2)) for number, size in enumerate(sizes)]
    parts = SubmitTasks("policy", N, whole, id="s").parts()
    assert [task for part in parts for task in part.tasks] == whole
    assert all(len(msgspec.json.encode(values_of(part))) <= MAX_BODY for part in parts)
    assert [part.first for part in parts] == [sum(len(each.tasks) for each in parts[:at]) for at in range(len(parts))]
    assert {part.total for part in parts} == {len(whole) if len(parts) > 1 else None}


@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_parts_in_any_order_are_the_submission_that_would_have_come_whole(runner: Runner, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(STEPS)
    def histories(steps: Sequence[tuple[int, int]]) -> None:
        runner(empty(runner.database))
        runner(carry_out(World(runner.database, clock=StillClock()), steps))

    histories()


def test_parts_that_come_at_once_are_one_submission(runner: Runner) -> None:
    async def at_once(seed: int) -> None:
        world = World(runner.database)
        await world.ledger.policies.register("policy")
        specs = [client.part(number) for client in CLIENTS[:2] for number in range(len(client.slices))] * 3
        random.Random(seed).shuffle(specs)
        told = await asyncio.gather(*(world.ledger.submissions.submit(spec, submission_id="a") for spec in specs))
        assert max(one.tasks for one in told) == len(LONG)
        assert (await world.ledger.submissions.get("a")).queued == len(LONG)
        claimed = await world.ledger.nodes.claim("node", ClaimRollouts(99, 1e4))
        assert [one.task for one in claimed] == [task for task in LONG for _ in range(N)]

    for seed in range(5):
        runner(empty(runner.database))
        runner(at_once(seed))


def test_the_same_id_in_two_parts_is_refused(runner: Runner) -> None:
    async def twice(world: World) -> None:
        await world.ledger.policies.register("policy")
        client = Client("twice", [SHARED, Task("shared", "do something else")], 1)
        await world.ledger.submissions.submit(client.part(0), submission_id="twice")
        with pytest.raises(Exception, match="two tasks have the id 'shared'"):
            await world.ledger.submissions.submit(client.part(1), submission_id="twice")
        assert not await world.ledger.nodes.has_work()

    runner(empty(runner.database))
    runner(twice(World(runner.database)))
