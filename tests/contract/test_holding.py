"""A trainer's side of leasing on a real ledger: what a step holds, and what becomes of it when a part is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolltap.contract.base import values_of
from rolltap.contract.trainer import Lease, LeaseOptions, LeaseRequest, Rewind, Rewound
from rolltap.errors import ServerUnreachable, StoreUnavailable, TrainerFenced
from rolltap.ledger.leases import LeaseKey
from rolltap.trainer_client.adapters.feed import Feed, FeedSettings
from rolltap.trainer_client.data.scoring import informative
from rolltap.trainer_client.lease.holder import LeaseHolder
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import GroupStatus

from ..unit.ledger.world import World, status

pytestmark = pytest.mark.asyncio(loop_scope="module")


class DirectClient:
    """The trainer's client, on a ledger instead of a server. To be used in another thread than the event loop's.

    `at_most` groups come with a lease. After the first acknowledgement the clock goes on by `late` seconds.
    """

    def __init__(self, world: World, incarnation: int, *, at_most: int = 8, late: float = 0.0) -> None:
        self._world = world
        self._incarnation = incarnation
        self._at_most = at_most
        self._late = late
        self._loop = asyncio.get_running_loop()

    def lease(self, policy: str, *, groups: int, options: LeaseOptions) -> Lease | None:
        asked = {**values_of(options), "at_least": 1, "wait": 0.0}
        request = LeaseRequest("trainer", policy, min(groups, self._at_most), incarnation=self._incarnation, **asked)
        lease = self._result(self._world.ledger.trainers.lease(request))
        return lease if lease.groups else None

    def ack(self, lease: Lease, step: int) -> int:
        count = self._result(self._world.ledger.trainers.acknowledge(self._key(lease), step))
        self._world.clock.ahead, self._late = self._world.clock.ahead + self._late, 0.0
        return count

    def release(self, lease: Lease) -> None:
        self._result(self._world.ledger.trainers.release(self._key(lease)))

    def extend(self, lease: Lease, ttl: float) -> None: ...

    def rewind(self, step: int, versions: dict[str, int]) -> Rewound:
        rewound = self._result(self._world.ledger.trainers.rewind("trainer", Rewind(step, versions, "run")))
        self._incarnation = rewound.incarnation
        return rewound

    def _key(self, lease: Lease) -> LeaseKey:
        return LeaseKey(lease.id, lease.token, self._incarnation)

    def _result(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


async def client_of(world: World, **more: Any) -> Any:
    rewound = await world.ledger.trainers.rewind("trainer", Rewind(0, {"policy": 0}, "run"))
    return DirectClient(world, rewound.incarnation, **more)


async def equal_groups(world: World, count: int) -> Sequence[str]:
    ids = []
    for _ in range(count):
        group = await world.open(2)
        for rollout in group.rollouts:
            await world.finish(await world.start(rollout, 0), 0.0)
        ids.append(group.id)
    return ids


async def test_groups_without_variance_that_a_step_holds_leave_room_for_those_that_it_needs(world: World) -> None:
    """A step of two at staleness 1 has room for four groups: four without variance filled it, and no
    others were opened."""
    client = await client_of(world)
    await equal_groups(world, 4)
    asked = iter(range(4))
    options = LeaseOptions(max_staleness=1, wait=0.1)
    holder = LeaseHolder(client, "policy", options, keep_zero_variance=False, trainable=lambda group: group)
    await asyncio.to_thread(holder.gather, 2, lambda: next(asked, None) is None)
    assert len(holder.groups) == 4
    assert not any(map(informative, holder.groups))
    assert (await world.ledger.policies.stats("policy")).room == 4, "as if the step held none"


async def test_a_feed_that_loses_one_of_its_leases_gives_the_others_back(world: World, tmp_path: Path) -> None:
    """Its gradient is forgotten, so what was acknowledged of it was not trained."""
    client = await client_of(world, at_most=1, late=700.0)
    groups = [await world.complete(2, 0), await world.complete(2, 0)]
    feed = Feed(client, FeedSettings("policy", 2, tmp_path), tmp_path / "feed")

    def step() -> bool:
        with feed.leasing(vocabulary=1000):
            feed.next_rows(make_recipe("dr_grpo", {}))
            return feed.acknowledge(1)

    assert not await asyncio.to_thread(step)
    request = LeaseRequest("trainer", "policy", 2, incarnation=client._incarnation)
    again = await world.ledger.trainers.lease(request)
    assert {one.group.id for one in again.groups} == {group.id for group in groups}


async def test_groups_that_are_trained_in_any_case_are_acknowledged_once_the_server_is_back(world: World) -> None:
    """Else the lease would end by its time, and the groups be trained again."""
    client = await client_of(world)
    ids = await equal_groups(world, 2)
    acknowledge, away = client.ack, [StoreUnavailable("away"), ServerUnreachable("away")]

    def ack(lease: Lease, step: int) -> int:
        if away:
            raise away.pop()
        return acknowledge(lease, step)

    client.ack = ack
    options = LeaseOptions(max_staleness=1, wait=0.1)
    holder = LeaseHolder(client, "policy", options, keep_zero_variance=True, trainable=lambda group: group)
    with holder:
        await asyncio.to_thread(holder.gather, 2, lambda: False)
        await asyncio.to_thread(holder.acknowledge_and_close, 1)
        assert holder.groups == ()
        assert not holder._extender.is_alive()
    assert [await status(world, id) for id in ids] == [GroupStatus.ACKNOWLEDGED] * 2


async def test_a_trainer_that_lost_its_policy_keeps_no_lease_of_trained_groups(world: World) -> None:
    client = await client_of(world)
    await equal_groups(world, 1)
    options = LeaseOptions(max_staleness=1, wait=0.1)
    with LeaseHolder(client, "policy", options, keep_zero_variance=True, trainable=lambda group: group) as holder:
        await asyncio.to_thread(holder.gather, 1, lambda: False)
        await world.ledger.trainers.rewind("another", Rewind(0, {"policy": 0}, "another-run", take_over=True))
        with pytest.raises(TrainerFenced):
            await asyncio.to_thread(holder.acknowledge_and_close, 1)
        assert holder.groups == ()
