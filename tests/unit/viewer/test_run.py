"""A run's page: what it is doing now, its curves, and where they lead."""

from __future__ import annotations

import re

import pytest

from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.contract.trainer import LeaseRequest
from rolltap.errors import NotFound
from rolltap.harnesses.client import ClaimedRollout
from rolltap.proxy.viewer.curves import Sample, curve_of
from rolltap.proxy.viewer.group import spread
from rolltap.proxy.viewer.one_file import one_file
from rolltap.types import RolloutStatus, Task

from ..reading.conftest import Talk
from .conftest import Viewed


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
    for title in ("Reward", "Length", "Calls", "Speed"):
        assert f'aria-label="{title} by group"' in page
    assert page.count(f'href="/view/groups/{group.id}"') >= 4
    shown = await viewed.get(f"/groups/{group.id}")
    assert shown.index("1.00</span>") < shown.index("0.00</span>"), "the best first"
    assert "What the evaluator saw" in shown
    assert waiting.id in await viewed.get("/groups")

    saved = await viewed.get("/runs/tiny/file")
    for title in ("Reward", "Length", "Calls", "Speed"):
        assert f'aria-label="{title} by group"' in saved
    assert f"group {group.id}: " in saved
    shown_parts = re.sub(r"<script.*?</script>", "", saved, flags=re.DOTALL)
    assert re.findall(r'(?:href|src)="(?!data:)[^"]*"', shown_parts) == [], "nothing is fetched, no link leads nowhere"
    with pytest.raises(NotFound, match="no session, no group and no policy 'nobody'"):
        await one_file(viewed.reading.reader, "nobody")


def test_a_curve_has_its_points_in_its_frame():
    curve = curve_of("Reward", "", [Sample(x, x * x, f"#{x}", "") for x in range(5000)])
    assert curve is not None
    assert len(curve.points) <= 700
    assert all(0 <= x <= 560 and 0 <= y <= 200 for x, y, _ in curve.points)
    assert curve_of("Reward", "", [Sample(1, float("nan"), "", "")]) is None
    flat = curve_of("Reward", "", [Sample(1, 3.0, "", "")])
    assert flat is not None
    assert flat.last == 3.0


def test_a_curve_of_versions_ends_at_the_last_version():
    curve = curve_of("Weight version", "", [Sample(x, float(x // 9), "", "") for x in range(100)], window=1)
    assert curve is not None
    assert curve.last == 11.0


def test_rewards_are_marks_with_the_best_first():
    assert spread((0.0, 1.0, None, 0.5)) == "●◑○–"
    assert spread((-2.0, 3.0)) == "●○"
    assert spread(()) == ""
