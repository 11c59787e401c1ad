"""What of a step's groups and rows the loss is over."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import AlignmentError
from rolltap.trainer_client.data.step import Credit, Step, StepRollout, StepRow, check_credit, view
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.run import planning
from rolltap.trainer_client.run.planning import Planner
from rolltap.trainer_client.settings import LossSettings, TrainerSettings

from .acting import spoken
from .making import group, random_group, record, segment


def weight_of(groups: list[LeasedGroup], loss: LossSettings) -> float:
    """The sum of what moves the policy: advantages by their weights."""
    step = planning.make_step(groups, loss)
    rows = planning.rows_to_train(step, make_recipe("dapo", {}).credit(step), loss)
    return sum(float(np.abs(row.advantages * row.weights)[row.segment.loss_mask].sum()) for row in rows)


@pytest.mark.parametrize("normalise", ["token", "rollout"])
def test_even_groups_that_are_dropped_do_not_dilute_the_loss(normalise: str) -> None:
    loss = LossSettings.model_validate({"normalise": normalise, "drop_zero_variance": True})
    differing, even = random_group("g", [1.0, 0.0], seed=1), random_group("e", [0.0, 0.0], seed=2)
    assert weight_of([differing, even, even], loss) == pytest.approx(weight_of([differing], loss))
    kept = loss.model_copy(update={"drop_zero_variance": False})
    assert weight_of([differing, even, even], kept) < weight_of([differing], kept)


def test_a_step_of_even_groups_alone_has_them() -> None:
    even = random_group("e", [0.0, 0.0])
    assert len(planning.make_step([even], LossSettings.model_validate({"drop_zero_variance": True})).rollouts) == 2


def test_a_sequence_ratio_has_all_rows_of_a_rollout_that_moves(tmp_path: Path) -> None:
    """It is a mean over all trained tokens of the rollout, those without an advantage, too."""
    segments = [segment(range(10), [5, 6]), segment(range(20, 30), [5, 6])]
    rollout = StepRollout("r", 0, "t", 1.0, True, 4, {}, ())
    step = Step(1, (rollout,), (), tuple(StepRow(0, each) for each in segments))
    credit = Credit((np.zeros(10, np.float32), segments[1].loss_mask.astype(np.float32)))
    common = {"key": "k", "policy": "p", "model": tmp_path, "out": tmp_path, "recipe": "turn_grpo"}
    numbers = {}
    for ratio in ("token", "sequence"):
        settings = TrainerSettings.model_validate({**common, "loss": {"ratio": ratio}})
        (rows,) = Planner(make_recipe("turn_grpo", {}), settings).updates(step, credit)
        numbers[ratio] = [row.number for row in rows]
    assert numbers == {"token": [1], "sequence": [0, 1]}


def test_a_number_for_each_rollout_or_turn_is_asked_for_by_name() -> None:
    step = planning.make_step([random_group("g", [1.0, 0.0])], LossSettings.model_validate({}))
    with pytest.raises(
        AlignmentError, match="broadcast takes 2 numbers, one for each of the step's rollouts; it got 0"
    ):
        step.broadcast(np.zeros(0))
    turns = len(step.turns)
    with pytest.raises(AlignmentError, match=rf"broadcast_turns takes {turns} numbers, .* turns; it got {turns + 1}"):
        step.broadcast_turns(np.zeros(turns + 1))


@pytest.mark.parametrize("name", ["advantages", "weights", "extra['teacher']"])
def test_an_array_that_fits_no_row_or_is_not_finite_is_named(name: str) -> None:
    step = view([group("g", [record("g", 0, [spoken("a", [([5], [8, 9], "")])], 1.0)])])

    def credit_of(*arrays: list[float]) -> Credit:
        made, fine = tuple(np.array(one, np.float32) for one in arrays), (np.ones(3, np.float32),)
        match name:
            case "advantages":
                return Credit(made)
            case "weights":
                return Credit(fine, weights=made)
        return Credit(fine, extra={"teacher": made})

    check_credit(credit_of([math.nan, 1, 1]), step)  # nothing is trained at the first token
    of_it = re.escape(f"the recipe's {name}")
    with pytest.raises(AlignmentError, match=of_it + " has 2 arrays for the step's 1 rows"):
        check_credit(credit_of([1, 1, 1], [1, 1, 1]), step)
    with pytest.raises(AlignmentError, match="rollout g-r0: " + of_it + " has 2 of 3 tokens"):
        check_credit(credit_of([1, 1]), step)
    for bad in (math.nan, math.inf):
        with pytest.raises(AlignmentError, match=rf"rollout g-r0, turn 0 \(call a-00\): {of_it} is {bad}"):
            check_credit(credit_of([1, 1, bad]), step)


def test_a_step_knows_its_images_who_has_loss_and_whether_groups_share_rollouts() -> None:
    alone = random_group("g", [1.0])
    assert not view([alone]).shared
    shares = replace(alone, group=replace(alone.group, trains={"other": "group"}))
    assert view([alone, shares]).shared
    pictures = [replace(alone, images={name: Path(name)}) for name in "ab"]
    assert view(pictures).images == {"a": Path("a"), "b": Path("b")}
    silent = record("g", 1, [segment(range(5), [])], 0.0)
    assert [one.trained for one in view([group("g", [*alone.rollouts, silent])]).rollouts] == [True, False]


def test_a_token_is_placed_by_its_rollout_and_turn() -> None:
    silent = record("g", 0, [segment(range(6), [5])], 0.0)
    both = record("g", 1, [spoken("a", [([5], [8, 9], ""), ([6], [7, 4], "")])], 1.0)
    step = view([group("g", [silent, both])])
    said = [step.where(row, place) for row, place in ((0, 5), (1, 1), (1, 5), (1, 0))]
    assert said == ["rollout g-r0", *(f"rollout g-r1, turn {at} (call a-0{at})" for at in (0, 1)), "rollout g-r1"]
