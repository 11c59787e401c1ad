"""Packs to tensors.

The shift is settled here once: a `Batch` holds, for each trained token, where it is predicted from (`sources_M`) and
which token it is (`targets_M`), so the network never shifts. Two rows that share a trunk may train the same place of it
with different advantages: that is two entries with one source. Shapes: `N` tokens of the pack, `M` trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rolltap.trainer_client.packing import Pack, TokenSpan

TEMPERATURE = "temperature"
"""The extra array of a segment with tokens that were sampled at another temperature than 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors of one forward pass.

    `logprobs_M` are the engine's and `versions_M` the weight versions that it sampled with. The step's loss is the sum
    over its batches of the sum over M of `weights_M` times the token's loss. `rollouts_M` are indices into the step's
    rollouts. `temperatures_M` are those that the tokens were sampled at; None where all were sampled at 1.
    `reference_M` are the reference model's log-probs, where there is one. `extra` [M] is the recipe's.
    """

    token_ids_N: Tensor
    position_ids_N: Tensor
    spans: tuple[TokenSpan, ...]
    sources_M: Tensor
    targets_M: Tensor
    logprobs_M: Tensor
    versions_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    rollouts_M: Tensor
    rows: int
    unshared_tokens: int
    temperatures_M: Tensor | None = None
    proximal_M: Tensor | None = None
    reference_M: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """N, the tokens that are computed."""
        return len(self.token_ids_N)

    @property
    def trained_tokens(self) -> int:
        """M."""
        return len(self.targets_M)

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        moved = {
            name: value.to(device, non_blocking=True)
            for name in self.__slots__
            if isinstance(value := getattr(self, name), Tensor)
        }
        extra = {name: value.to(device, non_blocking=True) for name, value in self.extra.items()}
        return replace(self, **moved, extra=extra)


def collate(pack: Pack) -> Batch:
    """The pack's tensors, on the CPU."""
    sources, targets, logprobs, versions, advantages, weights, rollouts = [], [], [], [], [], [], []
    for row, place in zip(pack.rows, pack.places, strict=True):
        trained = np.flatnonzero(row.segment.loss_mask)
        sources.append(place[trained - 1])
        targets.append(row.token_ids[trained])
        logprobs.append(row.segment.logprobs[trained])
        versions.append(row.segment.versions[trained])
        advantages.append(row.advantages[trained])
        weights.append(row.weights[trained])
        rollouts.append(np.full(len(trained), row.rollout))
    extra = {
        name: np.concatenate([row.extra[name][row.segment.loss_mask] for row in pack.rows])
        for name in pack.rows[0].extra
    }
    return Batch(
        token_ids_N=torch.from_numpy(pack.token_ids_N.astype(np.int64)),
        position_ids_N=torch.from_numpy(pack.position_ids_N.astype(np.int64)),
        spans=pack.spans,
        sources_M=torch.from_numpy(np.concatenate(sources).astype(np.int64)),
        targets_M=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        logprobs_M=torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
        versions_M=torch.from_numpy(np.concatenate(versions).astype(np.int64)),
        advantages_M=torch.from_numpy(np.concatenate(advantages).astype(np.float32)),
        weights_M=torch.from_numpy(np.concatenate(weights).astype(np.float32)),
        rollouts_M=torch.from_numpy(np.concatenate(rollouts).astype(np.int64)),
        rows=len(pack.rows),
        unshared_tokens=sum(len(row) for row in pack.rows),
        temperatures_M=_temperatures(pack),
        extra={name: torch.from_numpy(values.astype(np.float32)) for name, values in extra.items()},
    )


def _temperatures(pack: Pack) -> Tensor | None:
    """Of the trained tokens; calls that were sampled at 1 have none on record."""
    if not any(TEMPERATURE in row.segment.extras for row in pack.rows):
        return None
    values = [
        row.segment.extras.get(TEMPERATURE, np.ones(len(row.segment), np.float32))[row.segment.loss_mask]
        for row in pack.rows
    ]
    return torch.from_numpy(np.nan_to_num(np.concatenate(values), nan=1.0).astype(np.float32))


def empty_batch() -> Batch:
    """A batch of one token and no loss, whose gradient is zero: for a rank that has to make a pass all the same."""
    numbers, floats, token = torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(1, dtype=torch.int64)
    return Batch(
        token_ids_N=token,
        position_ids_N=token,
        spans=(TokenSpan(0, 1, 0),),
        sources_M=numbers,
        targets_M=numbers,
        logprobs_M=floats,
        versions_M=numbers,
        advantages_M=floats,
        weights_M=floats,
        rollouts_M=numbers,
        rows=0,
        unshared_tokens=0,
    )
