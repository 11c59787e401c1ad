"""Every scenario of the fault table once, at its small size. `make faults` runs them over many seeds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .registry import FAULTS, SCENARIOS, Scenario
from .world import Bench

SEED = 1

pytestmark = pytest.mark.timeout(400)  # a scenario is many starts of processes, each bounded by itself


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    shared = Bench()
    yield shared
    shared.close()


@pytest.mark.parametrize("scenario", [one for one in SCENARIOS if one.ci], ids=lambda one: one.name)
async def test_fault(bench: Bench, scenario: Scenario):
    async with scenario.world(bench, SEED, scenario.ci) as world:
        await scenario.run(world)
        assert world.checks
        world.assert_no_traceback()


def test_every_fault_has_a_scenario():
    assert {one.row for one in SCENARIOS} == set(FAULTS) == set(range(1, 26))
    assert {one.row for one in SCENARIOS if one.ci} == set(FAULTS)
