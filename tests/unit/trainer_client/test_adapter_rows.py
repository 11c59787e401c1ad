"""The rows that foreign trainers are given: what they would train otherwise than record and recipe say is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters.rows import rows_of
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.recipes.base import Recipe

from .acting import acted_group
from .making import group, record, segment


def sampled_at(temperatures: Sequence[float | None]) -> LeasedGroup:
    """A rollout each, its one trained token sampled at that temperature; None has none on record."""
    part = segment([5, 6, 7], [2])
    parts = [
        part if one is None else replace(part, extras={"temperature": np.array([np.nan, 0, one], np.float32)})
        for one in temperatures
    ]
    return group("g", [record("g", index, [one], float(index)) for index, one in enumerate(parts)])


@pytest.mark.parametrize(("recorded", "theirs"), [([0.7, 0.7], 1.0), ([None, None], 0.7), ([None, 0.7], 0.7)])
def test_another_temperature_than_the_trainers_is_refused(recorded: list[float | None], theirs: float) -> None:
    with pytest.raises(ConfigError, match=r"rollout g-r[01] was sampled at temperature (0\.7|1), the trainer computes"):
        rows_of([sampled_at(recorded)], make_recipe("grpo", {}), theirs)


@pytest.mark.parametrize(("recorded", "theirs"), [([0.7, 0.7], 0.7), ([None, None], 1.0), ([1.0, None], 1.0)])
def test_the_trainers_temperature_is_taken(recorded: list[float | None], theirs: float) -> None:
    assert len(rows_of([sampled_at(recorded)], make_recipe("grpo", {}), theirs)) == 2


def test_tokens_drawn_from_a_part_of_the_vocabulary_are_refused() -> None:
    part = segment([5, 6, 7], [2])
    masked = replace(part, extras={"sampling_mask": np.array([[0], [0], [7]], np.int32)})
    with pytest.raises(ConfigError, match=r"rollout g-r1 was sampled from a part of the vocabulary"):
        rows_of([group("g", [record("g", 0, [part], 0.0), record("g", 1, [masked], 1.0)])], make_recipe("grpo", {}))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "lite_ppo", "rloo", "reinforce", "reinforce_pp", "ssp"])
def test_a_recipe_that_is_its_advantage_can_be_fed(name: str) -> None:
    assert rows_of([acted_group("a", 1)], make_recipe(name, {}))


@pytest.mark.parametrize(
    "name", ["agentgym_rl", "aem", "cm2", "dapo", "epo", "gspo", "infopo", "ppo", "rise", "seeupo", "spear", "spiral"]
)
def test_a_recipe_that_is_more_than_its_advantage_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"take another, or rolltap train"):
        rows_of([acted_group("a", 1)], make_recipe(name, {}))


@pytest.mark.parametrize("part", ["admits", "admits_rollout"])
def test_a_recipe_that_chooses_what_carries_loss_is_refused(part: str) -> None:
    """The adapter would train groups, or refuse them, that `rolltap train` leaves out of the loss."""
    members = {"credit": lambda recipe, step: Recipe.credit(recipe, step), part: lambda *_: True}
    with pytest.raises(ConfigError, match=rf"more than advantages \({part}\)"):
        rows_of([acted_group("a", 1)], type("Chooses", (Recipe,), members)())
