"""What comes late, out of a proxy that stood still or a process that is gone, undoes nothing of what came after."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import sqlalchemy as sa

from rolltap.contract.control import RolloutControl
from rolltap.contract.operations import RequestTry, current_try
from rolltap.contract.trainer import BeginUpdate, Rewind
from rolltap.errors import LedgerError, RewindOvertaken
from rolltap.ledger.schema import attempts, controls, policies, trainers

from ..unit.ledger.world import World

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextmanager
def a_try(number: int) -> Iterator[None]:
    token = current_try.set(RequestTry("request", number))
    try:
        yield
    finally:
        current_try.reset(token)


async def start(world: World) -> Callable[[], Awaitable[Any]]:
    group = await world.open(1)
    sessions = iter(("first", "second", "third", "fourth"))
    return lambda: world.ledger.rollouts.start(group.rollouts[0].id, next(sessions))


async def rewind(world: World) -> Callable[[], Awaitable[Any]]:
    return lambda: world.ledger.trainers.rewind("trainer", Rewind(0, {"policy": 0}, "run"))


async def control(world: World) -> Callable[[], Awaitable[Any]]:
    caps = iter((1, 2, 3, 4))
    return lambda: world.ledger.controls.set("policy", RolloutControl(max_turns=next(caps)))


async def pause(world: World) -> Callable[[], Awaitable[Any]]:
    rewound = await world.ledger.trainers.rewind("trainer", Rewind(0, {"policy": 0}, "run"))
    by = BeginUpdate(trainer="trainer", incarnation=rewound.incarnation)
    versions = iter((1, 2, 3, 4))
    return lambda: world.ledger.policies.assign_version("policy", next(versions), "weights", by)


OPERATIONS = (start, rewind, control, pause)
STATE: Mapping[str, Any] = {
    "attempts": sa.select(attempts.c.rollout_id, attempts.c.attempt, attempts.c.session_id),
    "controls": sa.select(controls),
    "policies": sa.select(policies),
    "trainers": sa.select(trainers),
}


async def state(world: World) -> dict[str, list[tuple[Any, ...]]]:
    return {name: [tuple(row) for row in await world.database.select(query)] for name, query in STATE.items()}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_try_behind_a_later_one_changes_nothing(operation: Any, world: World) -> None:
    again = await operation(world)
    with a_try(2):
        await again()
    after = await state(world)
    for late in (0, 1):
        with a_try(late), pytest.raises(LedgerError, match="came late"):
            await again()
    assert await state(world) == after
    with a_try(3):
        await again()
    assert await state(world) != after


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_tries_in_order_and_requests_without_one_are_carried_out(operation: Any, world: World) -> None:
    again = await operation(world)
    for number in (0, 1, 1):
        with a_try(number):
            await again()
    await again()


async def test_a_rewind_out_of_a_process_that_is_gone_fences_nobody(world: World) -> None:
    """Processes of one trainer start, some die with their rewind under way, and what they sent comes at any time."""
    chance = random.Random(7)
    trainers_ = world.ledger.trainers
    for _ in range(60):
        late: list[Rewind] = []
        for _ in range(chance.randint(0, 3)):  # they die before they hear anything
            late.append(await _rewind_of(world))
            if chance.random() < 0.4:
                with suppress(RewindOvertaken):
                    await trainers_.rewind("trainer", late.pop(chance.randrange(len(late))))
        mine, sent = None, await _rewind_of(world)
        while mine is None:
            if late and chance.random() < 0.3:
                with suppress(RewindOvertaken):
                    await trainers_.rewind("trainer", late.pop())
            try:
                mine = await trainers_.rewind("trainer", sent)
            except RewindOvertaken:
                sent = await _rewind_of(world)
        before = await state(world)
        for one in late:
            with pytest.raises(RewindOvertaken, match="is in incarnation"):
                await trainers_.rewind("trainer", one)
        assert await state(world) == before
        assert (await trainers_.status("trainer")).incarnation == mine.incarnation
        with pytest.raises(RewindOvertaken):
            await trainers_.rewind("trainer", sent)  # its own, once more


async def _rewind_of(world: World) -> Rewind:
    """What a process sends that starts now."""
    known = await world.ledger.trainers.status("trainer")
    return Rewind(0, {"policy": 0}, "run", after=known.incarnation)
