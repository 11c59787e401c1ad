"""Five minutes of `make soak`, and the parts of it that can be looked at without a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import run
from .injections import LANES, needs_redis
from .run import Round, order_of, soak
from .world import VARIANTS

SECONDS = 300.0
AGENTS = 24


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_five_minutes_of_faults_leave_the_record_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes minutes of CPU seconds: two deployments, one after the other, each broken for 150 seconds."""
    monkeypatch.setattr(run, "REPORT", tmp_path / "soak.json")
    rounds: list[Round] = []
    await soak(1, SECONDS, AGENTS, rounds)
    run.show(rounds)
    assert [text for one in rounds for text in one.violations] == []
    assert sum(one.totals["seen complete"] for one in rounds) > 300
    assert sum(one.totals["groups in effect"] for one in rounds) > 20


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("number", [0, 2])
def test_two_rounds_have_every_injection_of_a_lane_in_their_first_halves(lane: str, number: int) -> None:
    orders = [order_of(lane, 7, each, VARIANTS[each % len(VARIANTS)]) for each in (number, number + 1)]
    of_redis = sum(map(needs_redis, LANES[lane]))
    begun = [one for order in orders for one in order[: (len(LANES[lane]) + 1) // 2 + of_redis]]
    assert set(begun) == set(LANES[lane])
    assert orders[0] == order_of(lane, 7, number, VARIANTS[number]) != order_of(lane, 8, number, VARIANTS[number])


def test_injections_have_names_of_their_own() -> None:
    names = [one.__name__ for lane in LANES.values() for one in lane]
    assert len(set(names)) == len(names)


async def test_a_soak_that_was_stopped_goes_on_with_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "REPORT", tmp_path / "soak.json")
    ran: list[tuple[int, float]] = []

    async def quick(seed: int, number: int, seconds: float, agents: int, only: str) -> Round:
        ran.append((number, seconds))
        return Round(seed, number, "", seconds, [], {}, [])

    monkeypatch.setattr(run, "run_round", quick)
    await soak(1, 200, 1, run.read(run.REPORT))
    await soak(1, 400, 1, run.read(run.REPORT))
    assert ran == [(0, 150), (1, 50), (2, 150), (3, 50)]
