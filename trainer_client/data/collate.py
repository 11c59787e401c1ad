"""Packs to tensors.

The shift by one token happens here and nowhere else. A `Batch` holds the places that predict trained tokens
(`sources_U`) and, for each trained token, its id (`targets_M`) and the index in `sources_U` of the place that predicts
it (`states_M`). Two rows that share a trunk may train the same place with different advantages: these are two entries
with one source. Shapes: `N` tokens of the pack, `U` places that predict, `M` trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rolltap.trainer_client.data.packing import Pack, PackedImage, TokenSpan
from rolltap.trainer_client.data.recorded import grammar_masks, sampling_masks, temperatures


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors of one forward pass.

    `logprobs_M` are the engine's log-probs and `versions_M` the weight versions that sampled the tokens. The step's
    loss is the sum over its batches and over M of `weights_M` times the token's loss. `rollouts_M` are indices into the
    step's rollouts. `temperatures_M` are the sampling temperatures; None if all are 1. `masks_MK` are the ids that each
    token was drawn from, padded with -1 (only -1: all ids); None if every token was drawn from all ids. `mask_rows_M`
    and `mask_table` are those that grammars left (`rolltap.token_masks`); None if there are none. `reference_M`
    are the reference model's log-probs; None without a reference. `extra` holds the recipe's own arrays [M].

    `experts_NX` are the recorded experts (-1: not known); None if none are replayed. `places` are the places of each
    row's tokens in the pack. `update_rows` counts the rows of the update that the batch is part of. With `images`,
    `image_positions_3N` are Qwen2-VL's positions.
    """

    token_ids_N: Tensor
    position_ids_N: Tensor
    spans: tuple[TokenSpan, ...]
    sources_U: Tensor
    states_M: Tensor
    targets_M: Tensor
    logprobs_M: Tensor
    versions_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    rollouts_M: Tensor
    rows: int
    unshared_tokens: int
    temperatures_M: Tensor | None = None
    masks_MK: Tensor | None = None
    mask_rows_M: Tensor | None = None
    mask_table: NDArray[np.int32] | None = None
    proximal_M: Tensor | None = None
    reference_M: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    experts_NX: Tensor | None = None
    places: tuple[Tensor, ...] = ()
    update_rows: int = 1
    images: tuple[PackedImage, ...] = ()
    image_positions_3N: Tensor | None = None

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
        places = tuple(place.to(device, non_blocking=True) for place in self.places)
        return replace(self, **moved, extra=extra, places=places)


def collate(pack: Pack, update_rows: int = 1) -> Batch:
    """The pack's tensors, on the CPU; `update_rows` as in `Batch`."""
    images = pack.images
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
    sources_U, states_M = predicting(np.concatenate(sources))
    segments = [row.segment for row in pack.rows]
    constrained = grammar_masks(segments)
    extra = {
        name: np.concatenate([row.extra[name][row.segment.loss_mask] for row in pack.rows])
        for name in pack.rows[0].extra
    }
    return Batch(
        token_ids_N=torch.from_numpy(pack.token_ids_N.astype(np.int64)),
        position_ids_N=torch.from_numpy(pack.position_ids_N.astype(np.int64)),
        spans=pack.spans,
        sources_U=sources_U,
        states_M=states_M,
        targets_M=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        logprobs_M=torch.from_numpy(np.concatenate(logprobs).astype(np.float32)),
        versions_M=torch.from_numpy(np.concatenate(versions).astype(np.int64)),
        advantages_M=torch.from_numpy(np.concatenate(advantages).astype(np.float32)),
        weights_M=torch.from_numpy(np.concatenate(weights).astype(np.float32)),
        rollouts_M=torch.from_numpy(np.concatenate(rollouts).astype(np.int64)),
        rows=len(pack.rows),
        unshared_tokens=sum(len(row) for row in pack.rows),
        temperatures_M=_tensor(temperatures(segments)),
        masks_MK=_tensor(sampling_masks(segments)),
        mask_rows_M=None if constrained is None else torch.from_numpy(constrained[0]),
        mask_table=None if constrained is None else constrained[1],
        extra={name: torch.from_numpy(values.astype(np.float32)) for name, values in extra.items()},
        experts_NX=None if pack.experts_NX is None else torch.from_numpy(pack.experts_NX.astype(np.int64)),
        places=tuple(torch.from_numpy(place.astype(np.int64)) for place in pack.places),
        update_rows=update_rows,
        images=images,
        image_positions_3N=torch.from_numpy(pack.image_positions_3N.astype(np.int64)) if images else None,
    )


def predicting(sources_M: NDArray[Any]) -> tuple[Tensor, Tensor]:
    """`sources_U`: the distinct values of `sources_M`; `states_M`: the index in `sources_U` for each token."""
    sources_U, states_M = np.unique(sources_M, return_inverse=True)
    return torch.from_numpy(sources_U.astype(np.int64)), torch.from_numpy(states_M.astype(np.int64))


def _tensor(values: NDArray[Any] | None) -> Tensor | None:
    return None if values is None else torch.from_numpy(values)


def empty_batch() -> Batch:
    """A batch of one token without loss, for a rank that must make a pass but has no batch. Its gradient is zero."""
    numbers, floats, token = torch.zeros(0, dtype=torch.int64), torch.zeros(0), torch.zeros(1, dtype=torch.int64)
    return Batch(
        token_ids_N=token,
        position_ids_N=token,
        spans=(TokenSpan(0, 1, 0),),
        sources_U=numbers,
        states_M=numbers,
        targets_M=numbers,
        logprobs_M=floats,
        versions_M=numbers,
        advantages_M=floats,
        weights_M=floats,
        rollouts_M=numbers,
        rows=0,
        unshared_tokens=0,
    )
