"""What recipes set for the rollouts of the next step, as their papers say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rolltap.contract.control import RolloutControl
from rolltap.contract.trainer import LeasedGroup
from rolltap.trainer_client.data.step import view
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.recipes.base import Recipe

from .acting import scripted
from .test_recipe_figures import by_turn


def test_tcod_grows_the_horizon() -> None:
    recipe = make_recipe("tcod", {"teacher": "folder"})
    assert [control(recipe, done).max_turns for done in (0, 6, 60, 249)] == [1, 2, 11, 30]


def test_agentgym_rl_grows_the_horizon() -> None:
    recipe = make_recipe("agentgym_rl", {})
    assert [control(recipe, done).max_turns for done in (0, 99, 100, 250, 999)] == [10, 10, 20, 30, 30]


def test_sec_weighs_the_tags_that_teach_more() -> None:
    """Group `a` of tag `easy` has rewards 1 and 0: |A| = .7071, Q = .3536; `b` of `hard` learns nothing."""
    recipe = make_recipe("sec", {"tags": ["easy", "hard"]})
    assert control(recipe, 0).curriculum == {"*": 1.0, "easy": 1.0, "hard": 1.0}
    groups = [tagged("a", "easy", [1.0, 0.0]), tagged("b", "hard", [0.0, 0.0])]
    assert by_turn(view(groups), recipe.credit(view(groups))) == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-3)
    assert recipe.state() == {"values": pytest.approx({"easy": 0.35355, "hard": 0.0}, abs=1e-4)}
    low = math.exp(-0.35355 / 0.5)
    assert control(recipe, 1).curriculum == pytest.approx({"*": low, "easy": 1.0, "hard": low}, abs=1e-4)


def test_sec_names_no_more_tags_than_a_curriculum_may() -> None:
    """The ones with the highest values; a task's tag may be anything, a curriculum's name not."""
    recipe = make_recipe("sec", {})
    recipe.restore({"values": {f"t{number}": float(number) for number in range(100)} | {"two\nlines": 200.0}})
    curriculum = control(recipe, 1).curriculum
    assert set(curriculum) == {"*"} | {f"t{number}" for number in range(37, 100)}


def control(recipe: Recipe, done: int) -> RolloutControl:
    """What the recipe sets after `done` steps."""
    after_step = recipe.after(done)
    assert after_step is not None
    return after_step


def tagged(name: str, tag: str, outcomes: Sequence[float]) -> LeasedGroup:
    one = scripted(name, [[0.0]] * len(outcomes), outcomes)
    return replace(one, task=replace(one.task, tags=(tag,)))
