"""The policy loss on recorded tokens.

    L = sum_t w_t [ -c_t min(rho_t A, clip(rho_t, 1 - low, 1 + high) A) + kl k3_t ]

(Schulman et al. 2017, eq. 7). `w_t` is the token's weight (`trainer_client/data/scoring.py`). A `Correction` decides
the denominator of rho, and c:

- `engine`: rho_t = pi / mu, with mu the engine's probability when it sampled. rho itself corrects staleness, within the
  clip. c = 1.
- `truncated`: rho_t = pi / pi_old, with pi_old the trainer's own probability when the step began, and
  c_t = min(pi_old / mu, cap): truncated importance sampling for stale tokens and for differences between engine and
  trainer (DART; Yao et al. 2025). Tokens whose pi_old / mu is outside `band` get c = 0.

An entry of `RATIOS` decides over which tokens rho is taken:

- `token`: rho_t of each token.
- `sequence` (GSPO, Zheng et al. 2025, eq. 7 and 13): s, the geometric mean of the rollout's token ratios, with the
  gradient of each token's own: sg(s) pi / sg(pi).

k3 = exp(q) - q - 1 with q = log ref - log pi (Schulman 2020) keeps the policy near a reference model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rolltap.errors import ConfigError
from rolltap.trainer_client.data.collate import Batch
from rolltap.trainer_client.model.network import Predictions

MOST_LOG_RATIO = 20.0
"""Limit of |log-ratio|, so that exp stays finite. A token beyond it is clipped or truncated anyway."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss of a batch, and its parts for the metrics: arrays [M] over trained tokens, without gradient.

    `log_ratio_M` is log rho, `clipped_M` is True where the clip cuts the gradient, `correction_M` is c, `kl_M` is k3.
    """

    loss: Tensor
    log_ratio_M: Tensor
    clipped_M: Tensor
    correction_M: Tensor
    kl_M: Tensor | None


@dataclass(frozen=True, slots=True)
class Correction:
    """The denominator of the ratio, and the weights c that go with it. See the module."""

    kind: Literal["engine", "truncated"] = "engine"
    cap: float = 1.0
    band: tuple[float, float] = (0.0, math.inf)

    @property
    def needs_proximal(self) -> bool:
        """Whether later updates of a step need the log-probs from before the first one."""
        return self.kind == "truncated"

    def __call__(self, logprobs_M: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The log-probs of the ratio's denominator, and c; both [M]."""
        if self.kind == "engine":
            return batch.logprobs_M, torch.ones_like(batch.logprobs_M)
        old_M = logprobs_M.detach() if batch.proximal_M is None else batch.proximal_M
        drift_M = (old_M - batch.logprobs_M).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()
        inside_M = (drift_M >= self.band[0]) & (drift_M <= self.band[1])
        return old_M, drift_M.clamp(max=self.cap) * inside_M


def token_ratio(logprobs_M: Tensor, old_M: Tensor, rollouts_M: Tensor) -> Tensor:
    """log rho of each token."""
    return (logprobs_M - old_M).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)


def sequence_ratio(logprobs_M: Tensor, old_M: Tensor, rollouts_M: Tensor) -> Tensor:
    """log rho of each token's rollout: the mean over all its trained tokens. They must all be in this batch."""
    difference_M = logprobs_M.detach() - old_M
    members, index_M = rollouts_M.unique(return_inverse=True)
    sums = torch.zeros(len(members), dtype=difference_M.dtype, device=difference_M.device)
    sums = sums.index_add(0, index_M, difference_M)
    mean_M = (sums / torch.bincount(index_M))[index_M]
    return mean_M.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO) + logprobs_M - logprobs_M.detach()


RatioKind = Literal["token", "sequence"]
RATIOS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"token": token_ratio, "sequence": sequence_ratio}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped policy gradient. `clip_low` and `clip_high` may differ, as in DAPO (0.2, 0.28).

    If A < 0, the clip does not limit a growing rho, so one token that became likely can dominate. `clip_dual`
    c > 1 caps the loss of tokens with negative advantage at c |A| (Ye et al. 2020, eq. 5). 0 disables it.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 0.0
    ratio: RatioKind = "token"
    correction: Correction = Correction()
    kl: float = 0.0

    def __post_init__(self) -> None:
        if self.clip_dual and self.clip_dual <= 1:
            raise ConfigError(f"clip_dual is {self.clip_dual}: it must be over 1, or 0 for none")
        if self.ratio not in RATIOS:
            raise ConfigError(f"no ratio {self.ratio!r}; known: {', '.join(RATIOS)}")

    def __call__(self, predicted: Predictions, batch: Batch) -> Terms:
        """The batch's part of the step's loss, which is the sum over the step's batches."""
        logprobs_M = predicted.logprobs_M
        old_M, correction_M = self.correction(logprobs_M, batch)
        log_ratio_M = RATIOS[self.ratio](logprobs_M, old_M, batch.rollouts_M)
        ratio_M = log_ratio_M.exp()
        free_M = ratio_M * batch.advantages_M
        held_M = ratio_M.clamp(1 - self.clip_low, 1 + self.clip_high) * batch.advantages_M
        gain_M = torch.minimum(free_M, held_M)
        if self.clip_dual:
            floor_M = torch.where(batch.advantages_M < 0, self.clip_dual * batch.advantages_M, -math.inf)
            gain_M = torch.maximum(gain_M, floor_M)
        loss_M = -correction_M * gain_M
        kl_M = None
        if self.kl:
            if batch.reference_M is None:
                raise ConfigError("a loss with kl > 0 needs the reference model's log-probs in its batches")
            difference_M = (batch.reference_M - logprobs_M).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
            kl_M = difference_M.exp() - difference_M - 1
            loss_M = loss_M + self.kl * kl_M
        return Terms(
            loss=(loss_M * batch.weights_M).sum(),
            log_ratio_M=log_ratio_M.detach(),
            clipped_M=gain_M != free_M,
            correction_M=correction_M,
            kl_M=None if kl_M is None else kl_M.detach(),
        )
