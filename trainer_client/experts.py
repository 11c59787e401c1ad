"""What is on record of a mixture's experts, against the model that is to replay them. Only numpy is needed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolltap.errors import AlignmentError
from rolltap.types import ROUTED_EXPERTS, Segment


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A mixture's numbers: its decoder layers, those of them with experts, how many, and `top_k` of them a token."""

    depth: int
    layers: tuple[int, ...]
    experts: int
    top_k: int

    def columns(self, width: int) -> Sequence[int]:
        """Which of a record's layers the model's blocks are, where a token has `width` recorded experts.

        Engines record every decoder layer, or only those with experts. `AlignmentError` for another number.
        """
        layers, rest = divmod(width, self.top_k)
        if rest == 0 and layers == self.depth:
            return self.layers
        if rest == 0 and layers == len(self.layers):
            return range(layers)
        raise AlignmentError(
            f"{width} experts are recorded for a token; the model has {self.top_k} in each of {len(self.layers)} "
            f"layers of experts, {self.depth} layers in all"
        )

    def check(self, segment: Segment) -> None:
        """`AlignmentError` where a trained token's choice, or any recorded expert, can't be this model's."""
        recorded = segment.extras.get(ROUTED_EXPERTS)
        if recorded is None:
            return
        table = recorded.reshape(len(segment), -1)
        columns = self.columns(table.shape[1])
        replayed = table.reshape(len(segment), -1, self.top_k)[:, list(columns)]
        if (replayed >= self.experts).any():  # of context too: an index that is out of bounds ends a GPU's process
            raise AlignmentError(f"the experts recorded for a token are not {self.top_k} of {self.experts}")
        trained = replayed[segment.loss_mask]
        is_whole = (trained >= 0).all(axis=(1, 2))
        if ((trained >= 0).any(axis=(1, 2)) != is_whole).any():
            raise AlignmentError(f"the experts recorded for a trained token are not {self.top_k} of {self.experts}")
        ordered = np.sort(trained[is_whole], axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise AlignmentError("an expert is recorded twice for one layer of a trained token")

    def unrouted(self, segment: Segment) -> int:
        """How many trained tokens have no recorded experts."""
        recorded = segment.extras.get(ROUTED_EXPERTS)
        if recorded is None:
            return int(segment.loss_mask.sum())
        return int((recorded.reshape(len(segment), -1)[segment.loss_mask] < 0).any(axis=1).sum())
