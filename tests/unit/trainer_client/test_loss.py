"""The loss by the numbers of its sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rolltap.errors import ConfigError
from rolltap.trainer_client.data.collate import Batch
from rolltap.trainer_client.model.loss import MOST_LOG_RATIO, Correction, PolicyLoss, Terms, sequence_ratio
from rolltap.trainer_client.model.network import Predictions


def batch_of(
    behaviour: Sequence[float],
    advantages: Sequence[float],
    rollouts: Sequence[int] | None = None,
    **more: Any,
) -> Batch:
    """A batch of which only the loss's part matters; every token weighs 1."""
    count = len(behaviour)
    none = torch.zeros(0, dtype=torch.long)
    return Batch(
        token_ids_N=none, position_ids_N=none, spans=(), sources_U=none, states_M=none, targets_M=torch.zeros(count),
        logprobs_M=torch.tensor(behaviour), versions_M=torch.zeros(count),
        advantages_M=torch.tensor(advantages), weights_M=torch.ones(count),
        rollouts_M=torch.tensor(rollouts or [0] * count), rows=1, unshared_tokens=0, **more,
    )  # fmt: skip


def run(loss: PolicyLoss, logprobs: Sequence[float], batch: Batch) -> tuple[Terms, Tensor]:
    """The loss's terms and its gradient by each log-prob."""
    current = torch.tensor(logprobs, requires_grad=True)
    terms = loss(Predictions(current, torch.zeros(len(logprobs))), batch)
    (gradient,) = torch.autograd.grad(terms.loss, current)
    return terms, gradient


def test_the_ratio_is_taken_to_the_engines_log_probs() -> None:
    terms, gradient = run(PolicyLoss(), [-1.0, -2.0], batch_of([-1.1, -1.9], [1.0, -1.0]))
    ratios = [math.exp(0.1), math.exp(-0.1)]
    assert float(terms.loss.detach()) == pytest.approx(-(ratios[0] - ratios[1]))
    assert gradient.tolist() == pytest.approx([-ratios[0], ratios[1]])


def test_the_clip_cuts_only_moves_that_went_too_far() -> None:
    logprobs = [math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)]
    terms, gradient = run(PolicyLoss(0.2, 0.28), logprobs, batch_of([0.0] * 4, [1.0, -1.0, 1.0, -1.0]))
    assert terms.clipped_M.tolist() == [True, False, False, True]
    assert gradient.tolist() == pytest.approx([0, 1.5, -0.5, 0])
    assert float(terms.loss.detach()) == pytest.approx(-(1.28 - 1.5 + 0.5 - 0.8))


def test_clip_higher_leaves_more_room_above() -> None:
    for high, clipped in ((0.2, True), (0.28, False)):
        terms, _ = run(PolicyLoss(0.2, high), [math.log(1.25)], batch_of([0.0], [1.0]))
        assert terms.clipped_M.tolist() == [clipped]


def test_the_dual_clip_bounds_what_a_bad_token_can_lose() -> None:
    logprobs = [math.log(10), math.log(2), math.log(10)]
    terms, gradient = run(PolicyLoss(clip_dual=3.0), logprobs, batch_of([0.0] * 3, [-1.0, -1.0, 1.0]))
    assert terms.clipped_M.tolist() == [True, False, True]
    assert gradient.tolist() == pytest.approx([0, 2, 0])
    assert float(terms.loss.detach()) == pytest.approx(3 + 2 - 1.2)
    with pytest.raises(ConfigError, match=r"clip_dual is 0\.5"):
        PolicyLoss(clip_dual=0.5)


def test_gspo_takes_the_geometric_mean_over_the_rollout() -> None:
    loss = PolicyLoss(ratio="sequence")
    terms, gradient = run(loss, [0.2, -0.1, -1.0], batch_of([0.0, 0.0, -1.0], [1.0, 1.0, 1.0], [4, 4, 9]))
    assert terms.log_ratio_M.exp().tolist() == pytest.approx([1.0513, 1.0513, 1.0], abs=1e-4)
    assert gradient.tolist() == pytest.approx([-1.0513, -1.0513, -1.0], abs=1e-4)


def test_gspo_clips_whole_rollouts() -> None:
    loss = PolicyLoss(3e-4, 4e-4, ratio="sequence")
    _, gradient = run(loss, [0.3, -0.1, 0.0], batch_of([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0, 0, 1]))
    assert gradient.tolist() == pytest.approx([0, 0, -1])


def test_truncated_importance_weighs_stale_tokens() -> None:
    """DART: log differences of 0.2 and -0.3 between trainer and engine weigh 1 and 0.7408."""
    loss = PolicyLoss(correction=Correction("truncated"))
    terms, gradient = run(loss, [-0.8, -1.3], batch_of([-1.0, -1.0], [1.0, 1.0]))
    assert terms.correction_M.tolist() == pytest.approx([1, 0.7408], abs=1e-4)
    assert gradient.tolist() == pytest.approx([-1, -0.7408], abs=1e-4)
    assert terms.log_ratio_M.tolist() == [0, 0]


def test_later_updates_of_a_step_keep_the_ratio_to_its_beginning() -> None:
    loss = PolicyLoss(correction=Correction("truncated", cap=2.0))
    batch = batch_of([-1.0], [1.0], proximal_M=torch.tensor([-0.8]))
    terms, _ = run(loss, [-0.7], batch)
    assert terms.log_ratio_M.tolist() == pytest.approx([0.1])
    assert terms.correction_M.tolist() == pytest.approx([math.exp(0.2)])


def test_tokens_outside_the_band_are_left_out() -> None:
    loss = PolicyLoss(correction=Correction("truncated", cap=5.0, band=(0.5, 2.0)))
    terms, _ = run(loss, [-1.0, -1.0, -1.0], batch_of([-1.1, -3.0, -0.1], [1.0] * 3))
    assert terms.correction_M.tolist() == pytest.approx([math.exp(0.1), 0, 0])


def test_the_divergence_is_never_negative_and_pulls_towards_the_reference() -> None:
    batch = batch_of([-1.0, -1.0], [0.0, 0.0], reference_M=torch.tensor([-1.5, -1.0]))
    terms, gradient = run(PolicyLoss(kl=0.1), [-1.0, -1.0], batch)
    assert terms.kl_M is not None
    assert terms.kl_M.tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, 0])
    assert gradient.tolist() == pytest.approx([0.1 * (1 - math.exp(-0.5)), 0])


def test_extreme_ratios_stay_finite() -> None:
    terms, gradient = run(PolicyLoss(), [-500.0, 0.0], batch_of([0.0, -500.0], [-1.0, -1.0]))
    assert math.isfinite(float(terms.loss.detach()))
    assert torch.isfinite(gradient).all()


def test_a_rollouts_mean_ratio_is_bounded_and_keeps_each_tokens_gradient() -> None:
    for far in (-1000.0, 1000.0):
        logprobs = torch.zeros(2, requires_grad=True)
        ratio = sequence_ratio(logprobs, torch.full((2,), -far), torch.tensor([7, 7]))
        assert ratio.tolist() == [math.copysign(MOST_LOG_RATIO, far)] * 2
        assert torch.autograd.grad(ratio.sum(), logprobs)[0].tolist() == [1, 1]


def test_what_a_loss_reports_has_no_gradient() -> None:
    current = torch.tensor([-1.0], requires_grad=True)
    loss = PolicyLoss(kl=0.1, correction=Correction("truncated"))
    terms = loss(Predictions(current, torch.zeros(1)), batch_of([-1.1], [1.0], reference_M=torch.tensor([-1.2])))
    assert terms.loss.requires_grad
    reported = (terms.log_ratio_M, terms.clipped_M, terms.correction_M, terms.kl_M)
    assert not any(one is None or one.requires_grad for one in reported)


def test_a_dual_clip_is_over_1_or_none() -> None:
    PolicyLoss(clip_dual=1.5)
    for bad in (1.0, 0.5, -1.0):
        with pytest.raises(ConfigError, match="it must be over 1, or 0 for none"):
            PolicyLoss(clip_dual=bad)


def test_an_unknown_ratio_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no ratio 'turn'; known: token, sequence"):
        PolicyLoss(ratio="turn")  # type: ignore[arg-type]


def test_a_divergence_needs_a_reference() -> None:
    with pytest.raises(ConfigError, match="reference"):
        run(PolicyLoss(kl=0.1), [-1.0], batch_of([-1.0], [1.0]))
