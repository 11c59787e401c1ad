"""Who may train a policy, one suite over both databases: one incarnation of one run, until another takes over."""

from __future__ import annotations

import asyncio
import time

import pytest

from rolltap.calllog.database import Database
from rolltap.contract.trainer import BeginUpdate, LeaseRequest, Rewind, Rewound
from rolltap.errors import InvalidRequest, LeaseLost, LedgerError, TrainerFenced, UnknownPolicy
from rolltap.ledger import leases
from rolltap.ledger.leases import LeaseKey
from rolltap.ledger.unit_of_work import Tx
from rolltap.types import GroupStatus

from ..unit.ledger.world import World, key, status

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def restored(world: World, name: str, step: int = 0, version: int = 0, *, run: str = "", **more: bool) -> Rewound:
    rewind = Rewind(step, {"policy": version}, run or f"run of {name}", **more)
    return await world.ledger.trainers.rewind(name, rewind)


async def pushed(world: World, name: str, incarnation: int, version: int, digest: str = "") -> None:
    policies = world.ledger.policies
    by = BeginUpdate(trainer=name, incarnation=incarnation)
    await policies.assign_version("policy", version, digest or f"weights {version}", by)
    await policies.set_version("policy", version)


def of(name: str, incarnation: int, groups: int = 1) -> LeaseRequest:
    return LeaseRequest(name, "policy", groups, incarnation=incarnation)


async def test_another_trainer_is_told_who_trains_the_policy(world: World) -> None:
    """A second `rolltap train` with an empty folder: nothing of the first one's changes."""
    first = (await restored(world, "one")).incarnation
    await pushed(world, "one", first, 2)
    fresh = await world.complete(2, 2)
    told = r"policy 'policy' is trained by 'one' since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC.*--take-over.*take_over=True"
    with pytest.raises(TrainerFenced, match=told):
        await restored(world, "two")
    with pytest.raises(TrainerFenced, match=told):
        await world.ledger.trainers.lease(of("two", 0))
    with pytest.raises(TrainerFenced, match=told):
        await pushed(world, "two", 0, 3)
    state = await world.ledger.policies.get("policy")
    assert (state.version, state.owner) == (2, "one")
    lease = await world.ledger.trainers.lease(of("one", first))
    assert [group.group.id for group in lease.groups] == [fresh.id]
    await pushed(world, "one", first, 3)


async def test_another_run_of_the_same_name_is_refused(world: World) -> None:
    await restored(world, "one", run="its folder")
    with pytest.raises(TrainerFenced, match=r"the name 'one' belongs to another run since .* another name"):
        await restored(world, "one", run="an empty folder")
    await restored(world, "one", run="an empty folder", take_over=True)
    with pytest.raises(TrainerFenced, match="another run since"):
        await restored(world, "one", run="its folder")


async def test_a_trainer_with_its_own_folder_comes_back_by_itself(world: World) -> None:
    for incarnation in (1, 2, 3):
        assert (await restored(world, "one")).incarnation == incarnation


async def test_a_call_without_an_incarnation_is_told_where_to_take_it_from(world: World) -> None:
    await restored(world, "one")
    with pytest.raises(TrainerFenced, match=r"stop this process, or send `incarnation` from rewind's reply$"):
        await world.ledger.trainers.lease(of("one", 0))


async def test_a_zombie_of_the_same_run_trains_nothing_more(world: World) -> None:
    """A paused machine wakes after its trainer was started elsewhere: what it asks for is refused, nothing is lost."""
    zombie = (await restored(world, "one")).incarnation
    group = await world.complete(1)
    held = await world.ledger.trainers.lease(of("one", zombie))
    now = (await restored(world, "one")).incarnation
    trainers, policies = world.ledger.trainers, world.ledger.policies
    by = BeginUpdate(trainer="one", incarnation=zombie)
    for refused in (
        trainers.lease(of("one", zombie)),
        trainers.extend(key(held, zombie), 60),
        trainers.acknowledge(key(held, zombie), 1),
        trainers.refuse(key(held, zombie), "late"),
        trainers.release(key(held, zombie)),
        policies.check_weights_owner("policy", by),
        policies.assign_version("policy", 1, "its weights", by),
    ):
        with pytest.raises(TrainerFenced, match=rf"has the newer incarnation {now} since .* stop this process$"):
            await refused
    lease = await trainers.lease(of("one", now))
    assert [one.group.id for one in lease.groups] == [group.id]
    assert await trainers.acknowledge(key(lease, now), 1) == 1


async def test_taking_over_ends_the_others_leases_and_keeps_what_it_trained(world: World) -> None:
    one = (await restored(world, "one")).incarnation
    trained = await world.complete(1)
    lease = await world.ledger.trainers.lease(of("one", one))
    await world.ledger.trainers.acknowledge(key(lease, one), 1)
    await pushed(world, "one", one, 1)
    held = await world.complete(1, 0)
    open_lease = await world.ledger.trainers.lease(of("one", one))
    two = await restored(world, "two", take_over=True)
    assert two.versions == {"policy": 2}  # not 1, which stands for the other's weights
    with pytest.raises(TrainerFenced, match="is trained by 'two'"):
        await world.ledger.trainers.acknowledge(key(open_lease, one), 2)
    with pytest.raises(TrainerFenced, match="is trained by 'two'"):
        await restored(world, "one", 1, 1)
    again = await world.ledger.trainers.lease(of("two", two.incarnation))
    assert [group.group.id for group in again.groups] == [held.id]
    assert await status(world, trained.id) is GroupStatus.ACKNOWLEDGED
    back = await restored(world, "one", 1, 1, take_over=True)
    with pytest.raises(LeaseLost, match="is taken over"):
        await world.ledger.trainers.acknowledge(key(open_lease, back.incarnation), 2)
    with pytest.raises(TrainerFenced):
        await world.ledger.trainers.acknowledge(key(again, two.incarnation), 1)


async def test_a_version_is_never_pushed_with_other_weights(world: World) -> None:
    now = (await restored(world, "one")).incarnation
    for _ in range(2):  # a push whose reply was lost is sent again
        await pushed(world, "one", now, 1, "digest a")
    with pytest.raises(LedgerError, match="version 1 of policy 'policy' is assigned to weights with digest"):
        await pushed(world, "one", now, 1, "digest b")
    await pushed(world, "one", now, 2, "digest b")


async def test_weights_are_the_owners_alone(world: World) -> None:
    """While nobody has rewound, groups can be leased, but no weights pushed."""
    await world.complete(1)
    assert len((await world.ledger.trainers.lease(of("reader", 0))).groups) == 1
    with pytest.raises(TrainerFenced, match="has no trainer yet: rewind"):
        await pushed(world, "reader", 0, 1)


async def test_a_rewind_names_the_policies_it_restores(world: World) -> None:
    with pytest.raises(InvalidRequest, match="names the policies"):
        Rewind(1, {}, "run")
    with pytest.raises(UnknownPolicy):
        await world.ledger.trainers.rewind("one", Rewind(0, {"policy": 0, "nobody": 0}, "run"))
    assert (await world.ledger.policies.get("policy")).owner is None


async def test_a_trainer_of_two_policies_owns_both(world: World) -> None:
    await world.ledger.policies.register("other")
    both = Rewind(0, {"policy": 0, "other": 0}, "run")
    await world.ledger.trainers.rewind("one", both)
    for policy in ("policy", "other"):
        with pytest.raises(TrainerFenced, match=f"policy '{policy}' is trained by 'one'"):
            await world.ledger.trainers.rewind("two", Rewind(0, {policy: 0}, "another run"))


async def test_a_takeover_waits_for_an_acknowledgement_that_is_under_way(world: World, database: Database) -> None:
    """Both lock the lease and then the demand: in two orders, Postgres would have to end one of them."""
    first = (await restored(world, "one")).incarnation
    group = await world.complete()
    lease = await world.ledger.trainers.lease(of("one", first))
    shown = key(lease, first)
    if database.dialect_name == "sqlite":  # transactions run one after the other
        assert await world.ledger.trainers.acknowledge(shown, 1) == 1
        await restored(world, "two", take_over=True)
    else:
        async with database.write() as connection:
            await connection.run(lambda driver: leases.locked_lease(Tx(driver, time.time()), shown))
            takeover = asyncio.create_task(restored(world, "two", take_over=True))
            while not await database.query(lambda driver: driver.exec_driver_sql(WAITING).scalar_one()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await connection.run(lambda driver: leases.acknowledge(Tx(driver, time.time()), shown, 1)) == 1
        await takeover
    assert await status(world, group.id) is GroupStatus.ACKNOWLEDGED
    assert (await world.ledger.policies.get("policy")).owner == "two"


async def test_a_rewind_changes_nothing_of_policies_that_it_does_not_name(world: World) -> None:
    """Another run under the same name, for another policy, told to take over: its step is of its own policy."""
    await world.ledger.policies.register("another")
    first = (await restored(world, "one", run="its folder")).incarnation
    group = await world.complete(1)
    lease = await world.ledger.trainers.lease(of("one", first))
    await world.ledger.trainers.acknowledge(LeaseKey(lease.id, lease.token, first), 1)
    other = Rewind(0, {"another": 0}, "another folder", take_over=True)
    assert (await world.ledger.trainers.rewind("one", other)).acknowledged == 0
    assert await status(world, group.id) is GroupStatus.ACKNOWLEDGED
