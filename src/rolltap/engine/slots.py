"""The slots that requests are computed in: their tokens, their key-value cache, and the forward pass over them.

A free slot keeps the tokens of its last request. A new request takes the free slot that shares the longest prefix with
it, and computes only the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from rolltap.engine.model import CausalModel
from rolltap.engine.requests import ActiveRequest
from rolltap.engine.slot_cache import SlotCache


class EngineSlots:
    """Tokens and key-value cache of `slots` sequences of at most `context` tokens. For one thread."""

    def __init__(self, model: CausalModel, slots: int, context: int) -> None:
        self.count = slots
        self._model = model
        self._context = context
        self._cache = SlotCache(model.layers, slots, context)
        self._tokens = np.zeros((slots, context + 1), dtype=np.int64)
        self._cached = np.zeros(slots, dtype=np.int64)  # how many tokens of a free slot the cache holds

    def take(self, prompt_ids: Sequence[int], max_tokens: int, busy: Collection[int]) -> tuple[int, int]:
        """Puts a prompt into the best slot that is not in `busy`: the slot, and how many of its tokens are cached."""
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        slot, shared = self._best_slot(prompt, busy)
        self._tokens[slot, : len(prompt)] = prompt
        self._cache.grow(min(len(prompt) + max_tokens, self._context))
        return slot, shared

    def append(self, slot: int, position: int, token: int) -> None:
        """Puts a sampled token behind the others; it is computed by the next forward pass."""
        self._tokens[slot, position] = token

    def release(self, slot: int, cached: int) -> None:
        """Frees a slot whose first `cached` tokens a later request may reuse."""
        self._cached[slot] = cached

    def forget(self) -> None:
        """Marks all free slots as empty: the weights that they were computed with are gone."""
        self._cached[:] = 0

    def prefill(self, requests: Sequence[ActiveRequest], lengths: list[int]) -> None:
        """Caches the next `lengths` pending tokens of each request."""
        slots = torch.tensor([active.slot for active in requests])
        self._model.extend(self._place(requests, lengths, slots[:, None], slots), self._cache)

    def next_logits(self, requests: Sequence[ActiveRequest]) -> tuple[Tensor, list[Tensor] | None]:
        """Of the one pending token of each request: the logits [B,V] behind it, and in a mixture the experts [layers,k]
        that it went through.

        A contiguous view of the cache is free, a gathered copy is not. So this computes all slots up to the last one
        in use and drops the rows of unused slots.
        """
        width = max(active.slot for active in requests) + 1
        by_slot = {active.slot: active for active in requests}
        rows = [by_slot.get(slot) for slot in range(width)]
        lengths = [int(row is not None) for row in rows]
        ids = self._place(rows, lengths, torch.arange(width)[:, None], slice(0, width))
        places = [active.slot for active in requests]
        logits_BV = self._model.logits(ids, self._cache)[places, 0]
        experts_BTLk = self._model.experts(width)
        return logits_BV, None if experts_BTLk is None else [experts_BTLk[slot, 0] for slot in places]

    def _best_slot(self, prompt: np.ndarray, busy: Collection[int]) -> tuple[int, int]:
        """The free slot that shares the longest prefix with `prompt`, and the length of that prefix."""
        free = np.array([slot for slot in range(self.count) if slot not in busy])
        usable = len(prompt) - 1  # the last token is always computed: its logits are needed
        differs = self._tokens[free, :usable] != prompt[:usable]
        shared = np.where(differs.any(1), differs.argmax(1), usable) if usable else np.zeros(len(free), dtype=np.int64)
        shared = np.minimum(shared, self._cached[free])
        best = int(shared.argmax())
        return int(free[best]), int(shared[best])

    def _place(
        self, rows: Sequence[ActiveRequest | None], lengths: list[int], slots: Tensor, view: slice | Tensor
    ) -> Tensor:
        """The ids [B,T] of the next `lengths` pending tokens of each row, where the cache is set to. None: padding."""
        steps = torch.arange(max(lengths))[None]
        starts = torch.tensor([active.cached if active else 0 for active in rows])[:, None]
        counts = torch.tensor(lengths)[:, None]
        positions = torch.where(steps < counts, starts + steps, 0)
        columns = torch.where(steps < counts, starts + steps, self._cache.columns_held)
        ids = torch.from_numpy(self._tokens)[slots, positions]
        width = int(positions.max()) + 1
        device = self._model.device
        self._cache.place(slots.to(device), view, positions.to(device), columns.to(device), width)
        return ids.to(device)
