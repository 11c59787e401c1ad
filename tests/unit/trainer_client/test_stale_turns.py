"""What recipes make of rollouts whose stale tokens lost their loss (`stale = "mask"`), in parts or all of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rolltap.trainer_client.data.step import PolicyReading, Step, view
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.recipes.papers.infopo import InfoPO
from rolltap.trainer_client.run import planning
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.types import Segment

from .acting import rewarded, spoken
from .making import group, recipe_names, record


def stale(part: Segment, tokens: int) -> Segment:
    """The segment whose first `tokens` trained tokens lost their loss."""
    mask = part.loss_mask.copy()
    mask[np.flatnonzero(mask)[:tokens]] = False
    turns = tuple(replace(turn, trained=bool(mask[turn.start : turn.end].any())) for turn in part.turns)
    return replace(part, loss_mask=mask, turns=turns)


def two_turns(name: str) -> Segment:
    return spoken(name, [([5, 6, 7], [8, 9], ""), ([5, 6], [8, 10], "")])


def read(step: Step, names: list[str], heads: list[str]) -> Step:
    zeros = tuple(np.zeros(len(row.segment), np.float32) for row in step.rows)
    return replace(step, readings={name: PolicyReading(zeros, zeros, dict.fromkeys(heads, zeros)) for name in names})


def test_turns_keep_their_number_when_one_before_them_is_stale() -> None:
    """Else a second turn would be compared with first ones: rewards 3 and 1 at turn 1, 100 at turn 0."""
    rows = [stale(two_turns("ar0"), 2), two_turns("ar1")]
    first, second = (record("a", index, [row], 0.0) for index, row in enumerate(rows))
    made = [rewarded(first, turn_ar0_01=3.0), rewarded(second, turn_ar1_00=100.0, turn_ar1_01=1.0)]
    step = view([group("a", made)])
    assert [turn.index for turn in step.turns] == [1, 0, 1]
    credit = make_recipe("turn_grpo", {"estimator": "rloo"}).credit(step)
    assert [float(credit.advantages[turn.row][turn.places[0]]) for turn in step.turns] == [2.0, 0.0, -2.0]


def test_infopo_masks_the_feedback_and_not_the_reply_that_is_stale_in_part() -> None:
    step = view([group("a", [record("a", 0, [stale(two_turns("a"), 1)], 1.0)])])
    late = view([group("a", [record("a", 0, [_second_in_part(two_turns("a"))], 1.0)])])
    for one in (step, late):
        shown = InfoPO(filler=63).passes(one)["masked"].views
        assert shown is not None
        assert shown[0].segment.token_ids.tolist() == [5, 6, 7, 8, 9, 63, 63, 8, 10]


def _second_in_part(part: Segment) -> Segment:
    mask = part.loss_mask.copy()
    mask[-2] = False
    return replace(part, loss_mask=mask)


@pytest.mark.parametrize("name", recipe_names())
def test_a_step_without_a_trained_token_makes_no_update(name: str) -> None:
    options = {"tcod": {"teacher": "folder"}, "opd": {"teacher_policy": "teacher"}}.get(name, {})
    folder = Path("folder")
    settings = load_trainer_settings(key="key", policy="policy", model=folder, out=folder, recipe=name, options=options)
    bare = record("a", 0, [stale(two_turns("a"), 4)], 1.0)
    for groups in ([], [group("a", [bare])]):
        recipe, step = make_recipe(name, options), view(groups)
        step = read(step, list(recipe.passes(step)), list(recipe.heads))
        assert planning.Planner(recipe, settings).updates(step, recipe.credit(step)) == []
