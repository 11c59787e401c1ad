"""Groups of before come back beside fresh ones, and a recipe says which of their rollouts carry loss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltap.contract.trainer import Replay
from rolltap.errors import ConfigError, InvalidRequest
from rolltap.trainer_client.data.step import StepRollout
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.recipes.base import Recipe, ReplayedGroups
from rolltap.trainer_client.run.planning import make_step, rows_to_train
from rolltap.trainer_client.settings import LossSettings, TrainerSettings

from .making import random_group
from .plane import Plane
from .test_loop import dying, made, same, trainer, weights

SUCCESSES = """
from rolltap.contract.trainer import Replay
from rolltap.trainer_client.recipes.base import Recipe, ReplayedGroups


class Successes(Recipe):
    def replay(self, step):
        return ReplayedGroups(1, Replay(min_age=1))

    def admits_rollout(self, rollout):
        return not rollout.replayed or rollout.reward > 0
"""


class OfSuccesses(Recipe):
    def admits_rollout(self, rollout: StepRollout) -> bool:
        return not rollout.replayed or rollout.reward > 0


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "successes.py").write_text(SUCCESSES)
    return str(tmp_path / "successes.py")


def offer(plane: Plane) -> None:
    """Two groups, a step each; of the first, two rollouts of four succeed."""
    plane.offer(random_group("g0", [1.0, 0.0, 0.0, 1.0], seed=1), random_group("g1", [1.0, 0.0], seed=2))


def lines(settings: TrainerSettings) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (settings.out / "metrics.jsonl").read_text().splitlines()]


def test_only_successes_carry_loss_against_the_baseline_of_the_whole_group() -> None:
    """R [1, 0, 0, 1] → ±.866, as if all four were trained; two of them have rows, and weigh half each."""
    group = replace(random_group("g", [1.0, 0.0, 0.0, 1.0]), replay=True)
    recipe, loss = OfSuccesses(), LossSettings.model_validate({"normalise": "rollout"})
    step = recipe.filtered(make_step([group], loss))
    credit = recipe.credit(step)
    advantages = [float(one[-1]) for one in credit.advantages]
    assert advantages == pytest.approx([0.866, -0.866, -0.866, 0.866], abs=1e-4)
    rows = rows_to_train(step, credit, loss, zeros=True)
    assert [row.rollout for row in rows] == [0, 3]
    assert [float(row.weights[row.segment.loss_mask].sum()) for row in rows] == pytest.approx([0.5, 0.5])
    fresh = make_step([replace(group, replay=False)], loss)
    assert all(rollout.trained for rollout in recipe.filtered(fresh).rollouts)


def test_groups_come_back_beside_fresh_ones(plane: Plane, url: str, model: Path, recipe: str, tmp_path: Path) -> None:
    offer(plane)
    settings = made(url, model, tmp_path, groups=1, recipe=recipe)
    trainer(settings).run()
    assert (plane.acked, plane.replayed) == ({"g0": 1, "g1": 2}, [("g0", 2)])
    first, second = lines(settings)
    assert [(one["groups"], one["groups_replayed"], one["rollouts"]) for one in (first, second)] == [
        (1, 0, 4),
        (1, 1, 2),
    ]
    assert (first["rows"], second["rows"]) == (4, 2 + 2)


def test_spear_replays_what_was_better_than_usual(plane: Plane, url: str, model: Path, tmp_path: Path) -> None:
    """The mean of the first group is .5: its two successes come back."""
    offer(plane)
    settings = made(url, model, tmp_path, groups=1, recipe="spear", options={"groups": 1, "steps": 2})
    trainer(settings).run()
    assert plane.replayed == [("g0", 2)]
    assert [one["rows"] for one in lines(settings)] == [4, 2 + 2]


@pytest.mark.parametrize("name", ["file", "spear"])
def test_killed_and_resumed_each_replayed_group_counts_once(
    name: str, plane: Plane, url: str, model: Path, recipe: str, tmp_path: Path
) -> None:
    """It dies after the second step's groups were acknowledged, the replayed one among them."""
    chosen: dict[str, Any] = {"recipe": recipe} if name == "file" else {"recipe": name, "options": {"groups": 1}}
    straight, broken = (made(url, model, tmp_path, groups=1, out=tmp_path / out, **chosen) for out in ("one", "two"))
    offer(plane)
    trainer(straight).run()
    plane.forget()
    offer(plane)
    first = trainer(broken)
    first.checkpoints.save = dying(first.checkpoints.save, at=2)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert plane.replayed == [("g0", 2)]
    trainer(broken).run()
    assert (plane.acked, plane.replayed) == ({"g0": 1, "g1": 2}, [("g0", 2)])
    ends = [weights(one.out / "checkpoints" / "step-2") for one in (straight, broken)]
    assert all(np.allclose(ends[0][key], ends[1][key], atol=1e-6) for key in ends[0])
    assert lines(broken)[-1]["rows"] == 2 + 2


def test_a_replayed_group_whose_lease_is_lost_does_not_reach_the_weights(
    plane: Plane, url: str, model: Path, recipe: str, tmp_path: Path
) -> None:
    plane.lose = {"lease-3"}
    offer(plane)
    lost = made(url, model, tmp_path, groups=1, recipe=recipe, out=tmp_path / "lost")
    trainer(lost).run()
    assert (plane.acked, plane.replayed) == ({"g0": 1, "g1": 2}, [])
    plane.forget()
    offer(plane)
    without = made(url, model, tmp_path, groups=1, out=tmp_path / "without")
    trainer(without).run()
    assert same(*(weights(one.out / "checkpoints" / "step-2") for one in (lost, without)))


def test_a_filter_that_answers_nothing_is_named(
    plane: Plane, url: str, model: Path, recipe: str, tmp_path: Path
) -> None:
    Path(recipe).write_text(SUCCESSES.replace("return not rollout", "not rollout"))
    offer(plane)
    message = r"recipe Successes: admits_rollout returned None for rollout g0-r0, not True or False"
    with pytest.raises(ConfigError, match=message):
        trainer(made(url, model, tmp_path, groups=1, recipe=recipe)).run()
    assert plane.acked == {}
    assert [group.group.id for group in plane.ready] == ["g0", "g1"]


def test_a_replay_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="a recipe replays at least 1 group, not 0: `replay` returns None for none"):
        ReplayedGroups(0, Replay())
    with pytest.raises(ConfigError, match="at least 1 group"):
        make_recipe("spear", {"groups": 0}).replay(1)
    with pytest.raises(InvalidRequest, match="max_age at least min_age"):
        make_recipe("spear", {"age": 0}).replay(1)
