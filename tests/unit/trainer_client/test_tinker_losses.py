"""Tinker's losses by their documented formulas, written a second time over numbers, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rolltap.errors import InvalidRequest
from rolltap.trainer_client.endpoint.losses import LOSSES, find_loss
from rolltap.trainer_client.model.loss import MOST_LOG_RATIO

LOGPROBS, OLD, ADVANTAGES = [-1.0, -0.5, -2.0, -1.5], [-1.1, -1.5, -0.4, -1.2], [0.7, 0.4, 0.9, -0.6]
RATIOS = [math.exp(new - old) for new, old in zip(LOGPROBS, OLD, strict=True)]
LOW, HIGH, BETA = 0.7, 1.3, 0.2


def held(ratio: float) -> float:
    return min(max(ratio, LOW), HIGH)


def expected(name: str) -> tuple[float, list[float]]:
    """The loss, and its derivative by each log-prob."""
    rows = list(zip(LOGPROBS, OLD, RATIOS, ADVANTAGES, strict=True))
    match name:
        case "cross_entropy":
            return -sum(new * a for new, _, _, a in rows), [-a for *_, a in rows]
        case "importance_sampling":
            return -sum(ratio * a for _, _, ratio, a in rows), [-ratio * a for _, _, ratio, a in rows]
        case "ppo":
            free = [ratio * a <= held(ratio) * a for _, _, ratio, a in rows]
            return -sum(min(ratio * a, held(ratio) * a) for _, _, ratio, a in rows), [
                -ratio * a if moves else 0.0 for (_, _, ratio, a), moves in zip(rows, free, strict=True)
            ]
        case "cispo":
            return -sum(held(ratio) * new * a for new, _, ratio, a in rows), [-held(r) * a for _, _, r, a in rows]
        case _:
            return -sum(new * a - 0.5 * BETA * (new - old) ** 2 for new, old, _, a in rows), [
                -(a - BETA * (new - old)) for new, old, _, a in rows
            ]


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_and_its_gradient(name: str) -> None:
    given: dict[str, float | str] = {
        "ppo": {"clip_low_threshold": LOW, "clip_high_threshold": HIGH},
        "cispo": {"clip_low_threshold": LOW, "clip_high_threshold": HIGH},
        "dro": {"beta": BETA},
    }.get(name, {})  # type: ignore[assignment]
    loss, current = find_loss(name), torch.tensor(LOGPROBS, requires_grad=True)
    inputs = {
        "logprobs": torch.tensor(OLD),
        "advantages": torch.tensor(ADVANTAGES),
        "weights": torch.tensor(ADVANTAGES),
    }
    value = loss.compute(current, {key: inputs[key] for key in loss.inputs}, loss.config(name, given))
    total, gradient = expected(name)
    assert float(value.detach()) == pytest.approx(total, rel=1e-5)
    assert torch.autograd.grad(value, current)[0].tolist() == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("apart_by", [100.0, -100.0])
def test_ratios_are_held_at_both_ends(apart_by: float) -> None:
    inputs = {"logprobs": torch.zeros(1), "advantages": torch.ones(1)}
    found = LOSSES["importance_sampling"].compute(torch.tensor([apart_by]), inputs, {})
    assert float(found) == pytest.approx(-math.exp(math.copysign(MOST_LOG_RATIO, apart_by)))


def test_settings_without_a_word_are_the_documented_ones() -> None:
    assert find_loss("ppo").config("ppo", {"clip_low_threshold": 0.5}) == {
        "clip_low_threshold": 0.5,
        "clip_high_threshold": 1.2,
    }
    assert find_loss("dro").config("dro", {}) == {"beta": 0.05}


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gspo", {}, r"'gspo' is not computed here; known: cross_entropy, importance_sampling, ppo, cispo, dro$"),
        ("custom", {}, r"a custom loss runs in the client \(forward_backward_custom\)"),
        ("ppo", {"epsilon": 0.2}, "ppo has no 'epsilon'; known: clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 0.2}, "cross_entropy has no 'beta'; known: none"),
        ("dro", {"beta": math.nan}, "beta is nan, no number"),
        ("dro", {"beta": "much"}, "beta is 'much', no number"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        find_loss(name).config(name, config)
