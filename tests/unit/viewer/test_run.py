"""A run's page: what it is doing now, its curves, and where they lead."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.contract.trainer import LeaseRequest
from rolltap.errors import NotFound
from rolltap.harnesses.client import ClaimedRollout
from rolltap.proxy.viewer.one_file import one_file
from rolltap.proxy.viewer.runs import Run, chart_data, last_values, spread
from rolltap.reading.types import GroupEffort, RunPoint, TrainerStep
from rolltap.types import RolloutStatus, Task

from ..reading.conftest import Talk
from .conftest import Viewed


def data_of(page: str) -> dict[str, Any]:
    """The data of a page's charts."""
    found = re.search(r'id="chart-data"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


async def test_a_run_shows_leases_waiting_rollouts_and_curves_that_lead_to_groups(viewed: Viewed):
    home = viewed.reading.home
    group = await home.client.open_group(Task("zebra", "Find the zebra."), policy="tiny", n=2)
    for reward, rollout_id in enumerate(group.rollout_ids):
        opened = await home.client.start_rollout(ClaimedRollout(rollout_id, ""), ttl=60)
        await Talk(opened.session_id, opened.endpoint.key, home.urls["agent"], viewed.reading.http).two_turns()
        await home.client.reward(NewReward(rollout_id, float(reward)))
        await home.client.finish_rollout(rollout_id, FinishRollout(RolloutStatus.SUCCEEDED, attempt=1, evaluation="ok"))
    await home.app.ledger.trainers.lease(LeaseRequest("grpo-7", "tiny", 1))
    waiting = await home.client.open_group(Task("zebra", "Find the zebra."), policy="tiny", n=3)

    state = await viewed.reading.reader.run_state("tiny")
    assert [(lease.trainer, lease.groups) for lease in state.leases] == [("grpo-7", 1)]
    assert state.waiting_rollouts == 3
    page = await viewed.get("/runs/tiny")
    assert "grpo-7" in page
    assert "serving" in page, "the engine is up"
    data = data_of(page)
    assert {"Reward", "Length", "Calls", "Speed"} <= {chart["title"] for chart in data["charts"]}
    assert data["runs"][0]["groups"]["id"] == [group.id]
    assert data["links"]
    for told in ("Reward, mean of a group", "Length, tokens sampled a rollout"):
        assert told in page, "the last values are told in words, too"
    shown = await viewed.get(f"/groups/{group.id}")
    assert shown.index("1.00</span>") < shown.index("0.00</span>"), "the best first"
    assert "What the evaluator saw" in shown
    assert waiting.id in await viewed.get("/groups")

    saved = await viewed.get("/runs/tiny/file")
    assert data_of(saved)["runs"][0]["groups"]["reward"] == [0.5]
    assert not data_of(saved)["links"]
    assert "var uPlot" in saved
    shown_parts = re.sub(r"<script.*?</script>", "", saved, flags=re.DOTALL)
    assert re.findall(r'(?:href|src)="(?!data:)[^"]*"', shown_parts) == [], "nothing is fetched, no link leads nowhere"
    with pytest.raises(NotFound, match="no session, no group and no policy 'nobody'"):
        await one_file(viewed.reading.reader, "nobody")


def point(at: float, reward: float | None, **values: Any) -> RunPoint:
    fields = {"status": "complete", "rollouts": 4, "zero_variance": False, "oldest_version": 0, "newest_version": 0}
    return RunPoint(
        **{"group_id": f"g{at:g}", "at": at, "reward_mean": reward, "staleness": 0, "step": None, **fields, **values}
    )


def test_curves_of_several_runs_have_their_groups_evaluations_and_steps():
    effort = GroupEffort("g0", 4, 8, 100, 0.0, 10.0)
    measured = point(7200.0, 1.0, evaluation=True, newest_version=None)
    one = Run("one", [point(0.0, 0.5), point(3600.0, None), measured], {"g0": effort}, [])
    two = Run(
        "two",
        [point(9.0, float("nan"))],
        {},
        [TrainerStep(1, {"version": 1.0, "loss": 0.25, "grad_norm": float("inf")})],
    )
    data = chart_data([one, two], links=True)
    first, second = data["runs"]
    assert first["groups"]["id"] == ["g0", "g7200"], "a group without a reward has no place on the curves"
    assert first["groups"]["hours"] == [0.0, 2.0]
    assert first["groups"]["evaluation"] == [0, 1]
    assert first["groups"]["version"] == [0, None]
    assert (first["groups"]["length"], first["groups"]["speed"]) == ([25.0, None], [10.0, None])
    assert second["groups"]["reward"] == [None]
    assert second["steps"]["loss"] == [0.25]
    assert second["steps"]["grad_norm"] == [None], "what can't be drawn"
    titles = {chart["title"] for chart in data["charts"]}
    assert {"Reward", "Loss"} <= titles
    assert "Gradient norm" not in titles, "without a value there is no chart"
    json.dumps(data, allow_nan=False)
    assert ("Reward, mean of a group", "1", 2) in last_values(data)


def test_rewards_are_marks_with_the_best_first():
    assert spread((0.0, 1.0, None, 0.5)) == "●◑○–"
    assert spread((-2.0, 3.0)) == "●○"
    assert spread(()) == ""
