"""Tinker's losses. Each is a sum over a request's targets, not a mean.

Arrays have the shape [M], for M targets. `inputs` are the request's `loss_fn_inputs` by name, `config` its
`loss_fn_config`. The input `logprobs` has the log-probs at which the targets were sampled. Source: Tinker's page "Loss
functions".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rolltap.errors import InvalidRequest
from rolltap.trainer_client.model.loss import MOST_LOG_RATIO

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


def cross_entropy(logprobs_M: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(logprobs_M * inputs["weights"]).sum()


def importance_sampling(logprobs_M: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(_ratio(logprobs_M, inputs) * inputs["advantages"]).sum()


def ppo(logprobs_M: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_M, advantages_M = _ratio(logprobs_M, inputs), inputs["advantages"]
    return -torch.minimum(ratio_M * advantages_M, _clipped(ratio_M, config) * advantages_M).sum()


def cispo(logprobs_M: Tensor, inputs: Inputs, config: Config) -> Tensor:
    clipped_M = _clipped(_ratio(logprobs_M, inputs), config).detach()
    return -(clipped_M * logprobs_M * inputs["advantages"]).sum()


def dro(logprobs_M: Tensor, inputs: Inputs, config: Config) -> Tensor:
    distance_M = (logprobs_M - inputs["logprobs"]) ** 2
    return -(logprobs_M * inputs["advantages"] - 0.5 * config["beta"] * distance_M).sum()


def _ratio(logprobs_M: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs_M - inputs["logprobs"]).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _clipped(ratio_M: Tensor, config: Config) -> Tensor:
    return ratio_M.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


@dataclass(frozen=True, slots=True)
class TinkerLoss:
    """A loss function, the names of its inputs besides `target_tokens`, and its settings with their defaults."""

    compute: Callable[[Tensor, Inputs, Config], Tensor]
    inputs: tuple[str, ...] = ("advantages", "logprobs")
    defaults: Mapping[str, float] = field(default_factory=dict)

    def config(self, name: str, overrides: Mapping[str, float | str]) -> dict[str, float]:
        """The defaults with a request's `overrides`. Raises `InvalidRequest` for an unknown key or a value that is not
        a finite number. `name` is the loss's, for the message.
        """
        for key, value in overrides.items():
            if key not in self.defaults:
                known = ", ".join(self.defaults) or "none"
                raise InvalidRequest(f"loss_fn_config: {name} has no {key!r}; known: {known}", param="loss_fn_config")
            if isinstance(value, str) or not math.isfinite(value):
                raise InvalidRequest(f"loss_fn_config: {key} is {value!r}, no number", param="loss_fn_config")
        return {**self.defaults, **overrides}  # type: ignore[dict-item]  # the loop above refuses text


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

LOSSES: Mapping[str, TinkerLoss] = {
    "cross_entropy": TinkerLoss(cross_entropy, ("weights",)),
    "importance_sampling": TinkerLoss(importance_sampling),
    "ppo": TinkerLoss(ppo, defaults=CLIP),
    "cispo": TinkerLoss(cispo, defaults=CLIP),
    "dro": TinkerLoss(dro, defaults={"beta": 0.05}),
}


def find_loss(name: str) -> TinkerLoss:
    """The loss with this name. Raises `InvalidRequest`, which lists the known ones, if there is none."""
    if name not in LOSSES:
        hint = "; a custom loss runs in the client (forward_backward_custom)" if name == "custom" else ""
        message = f"loss_fn: {name!r} is not computed here; known: {', '.join(LOSSES)}{hint}"
        raise InvalidRequest(message, param="loss_fn")
    return LOSSES[name]
