"""Recipes that are GRPO's advantage under settings of their own, by figures that hold under these settings only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rolltap.contract.trainer import LeasedGroup
from rolltap.trainer_client.model.network import Predictions
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.run.planning import make_step, policy_loss, rows_to_train
from rolltap.trainer_client.settings import TrainerSettings, load_trainer_settings

from .acting import scripted, spoken
from .making import group, record, segment
from .test_loss import batch_of

LONG = 18_432
"""Tokens of a rollout that is half-way into DAPO's buffer of 4,096 below 20,480."""


def settings_of(name: str, **loss: Any) -> TrainerSettings:
    """The recipe's settings, with `loss` as the user's own."""
    required = {"key": "k", "policy": "p", "model": Path("m"), "out": Path("o")}
    return load_trainer_settings(None, **required, recipe=name, loss=loss)


@dataclass(frozen=True)
class Trained:
    """What a recipe trains of groups: each rollout's advantage, and what each of its tokens weighs (0: no row)."""

    advantages: list[float]
    weights: list[float]


def trained(name: str, groups: Sequence[LeasedGroup], **loss: Any) -> Trained:
    settings = settings_of(name, **loss)
    step = make_step(groups, settings.loss)
    credit = make_recipe(name, {}).credit(step)
    rows = rows_to_train(step, credit, settings.loss, zeros=True)
    weights = {row.rollout: float(row.weights[-1]) for row in rows}
    advantages = [float(one[-1]) for one in credit.advantages]
    return Trained(advantages, [weights.get(number, 0.0) for number in range(len(step.rollouts))])


def of_lengths(name: str, rewards: Sequence[float], lengths: Sequence[int]) -> LeasedGroup:
    """A rollout a reward, each with this many trained tokens after a prompt of one."""
    parts = [segment([1, *[2] * length], range(1, length + 1)) for length in lengths]
    pairs = zip(parts, rewards, strict=True)
    return group(name, [record(name, index, [part], reward) for index, (part, reward) in enumerate(pairs)])


def gain(name: str, ratio: float, advantage: float, **more: Any) -> float:
    """What a token of this ratio gains under the recipe's loss."""
    batch = batch_of([0.0], [advantage], **more)
    terms = policy_loss(settings_of(name).loss)(Predictions(torch.tensor([math.log(ratio)]), torch.zeros(1)), batch)
    return -float(terms.loss)


def test_artist_is_the_mean_of_the_rollouts_means() -> None:
    """Rollouts of one and three tokens weigh half each: 1/2 and 1/6 a token, not 1/4."""
    result = trained("artist", [of_lengths("g", [1.0, 0.0], [1, 3])])
    assert result.advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert result.weights == pytest.approx([1 / 2, 1 / 6])


def test_a_simulated_user_and_tools_carry_no_loss_in_mua_rl() -> None:
    """Two replies of two tokens with an answer of three between them: four tokens of seven."""
    part = spoken("a", [([1, 2], [8, 9], ""), ([3, 4, 5], [8, 9], "")])
    result = trained("mua_rl", [group("g", [record("g", index, [part], 1.0 - index) for index in range(2)])])
    assert result.weights == pytest.approx([1 / 8, 1 / 8])


def test_mua_rl_takes_32_groups_of_8_a_step() -> None:
    """One success in 8: R [1, 0 x 7] → 2.4749 and -.3536; each of 256 tokens weighs 1/256."""
    settings = settings_of("mua_rl")
    assert settings.groups == 32
    one_in_8 = [1.0, *[0.0] * 7]
    result = trained("mua_rl", [of_lengths(f"g{number}", one_in_8, [1] * 8) for number in range(settings.groups)])
    assert result.advantages[:3] == pytest.approx([2.4749, -0.3536, -0.3536], abs=1e-4)
    assert result.weights == pytest.approx([1 / 256] * 256)


def test_agentflow_clips_at_1_3_and_stays_near_the_first_weights() -> None:
    """k3 of a token that became half as likely to the reference: 2 - ln 2 - 1 = .3069, times .001."""
    reference = {"reference_M": torch.tensor([0.0])}
    assert gain("agentflow", 1.4, 1.0, reference_M=torch.tensor([math.log(1.4)])) == pytest.approx(1.3)
    assert gain("agentflow", 0.7, -1.0, reference_M=torch.tensor([math.log(0.7)])) == pytest.approx(-0.8)
    assert gain("agentflow", 0.5, 0.0, **reference) == pytest.approx(-0.001 * 0.3069, abs=1e-7)


def test_agentflow_compares_rollouts_however_many_calls_they_made() -> None:
    """R 1 in one call and 0 in three: mean .5, so ±.7071; over calls it would be 1.5 and -.5."""
    result = trained("agentflow", [scripted("g", [[0.0], [0.0, 0.0, 0.0]], [1.0, 0.0])])
    assert result.advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize("name", ["dapo", "grpo_tcr", "chain_of_agents"])
def test_dapo_and_its_kin_clip_higher_and_drop_even_groups(name: str) -> None:
    """Of the groups [1, 0] and [1, 1] the first remains, with 1 and 3 tokens: each weighs 1/4."""
    assert gain(name, 1.4, 1.0) == pytest.approx(1.28)
    assert gain(name, 0.7, -1.0) == pytest.approx(-0.8)
    result = trained(name, [of_lengths("g", [1.0, 0.0], [1, 3]), of_lengths("e", [1.0, 1.0], [2, 2])], overlong_limit=0)
    assert result.advantages == pytest.approx([0.7071, -0.7071], abs=1e-4)
    assert result.weights == pytest.approx([1 / 4, 1 / 4])


@pytest.mark.parametrize(
    ("name", "limit", "expected"),
    [
        ("dapo", {}, [1.3056, -0.7833, -0.7833, 0.2611]),
        ("chain_of_agents", {}, [0.866, -0.866, -0.866, 0.866]),
        ("grpo_tcr", {}, [0.866, -0.866, -0.866, 0.866]),
        ("grpo_tcr", {"overlong_limit": 20_480}, [1.3056, -0.7833, -0.7833, 0.2611]),
    ],
)
def test_who_pays_for_length(name: str, limit: dict[str, int], expected: list[float]) -> None:
    """The last success has 18,432 tokens: its reward is .5 under DAPO's limit, 1 where it is off or not yet set."""
    result = trained(name, [of_lengths("g", [1.0, 0.0, 0.0, 1.0], [1, 1, 1, LONG])], **limit)
    assert result.advantages == pytest.approx(expected, abs=1e-4)
