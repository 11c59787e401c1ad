"""The slots that requests are computed in: their tokens, their key-value cache, and the forward pass over them.

A free slot keeps the tokens of its last request. A new request takes the free slot that shares the longest prefix with
it, and computes only the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from rolltap.engine.model import CachePlan, KeyValueCache, Qwen3
from rolltap.engine.requests import ActiveRequest


class SlotCache:
    """Tokens and key-value cache of `slots` sequences of at most `context` tokens. For one thread."""

    def __init__(self, model: Qwen3, slots: int, context: int) -> None:
        self.count = slots
        self._model = model
        self._context = context
        self._cache = KeyValueCache(model.config, slots, context)
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
        self._forward(requests, lengths, slots[:, None], slots)

    def next_hidden(self, requests: Sequence[ActiveRequest]) -> Tensor:
        """Hidden states [B,hidden] of the one pending token of each request.

        A contiguous view of the cache is free, a gathered copy is not. So this computes all slots up to the last one
        in use and drops the rows of unused slots.
        """
        width = max(active.slot for active in requests) + 1
        by_slot = {active.slot: active for active in requests}
        rows = [by_slot.get(slot) for slot in range(width)]
        lengths = [int(row is not None) for row in rows]
        hidden_BTH = self._forward(rows, lengths, torch.arange(width)[:, None], slice(0, width))
        return hidden_BTH[[active.slot for active in requests], 0]

    def experts(self, requests: Sequence[ActiveRequest]) -> list[Tensor] | None:
        """The experts [layers,k] of each request's token in the pass of `next_hidden`; None without a mixture."""
        experts_BTLk = self._model.experts()
        return None if experts_BTLk is None else [experts_BTLk[active.slot, 0] for active in requests]

    def _best_slot(self, prompt: np.ndarray, busy: Collection[int]) -> tuple[int, int]:
        """The free slot that shares the longest prefix with `prompt`, and the length of that prefix."""
        free = np.array([slot for slot in range(self.count) if slot not in busy])
        usable = len(prompt) - 1  # the last token is always computed: its logits are needed
        differs = self._tokens[free, :usable] != prompt[:usable]
        shared = np.where(differs.any(1), differs.argmax(1), usable) if usable else np.zeros(len(free), dtype=np.int64)
        shared = np.minimum(shared, self._cached[free])
        best = int(shared.argmax())
        return int(free[best]), int(shared[best])

    def _forward(
        self, rows: Sequence[ActiveRequest | None], lengths: list[int], slots: Tensor, view: slice | Tensor
    ) -> Tensor:
        """Hidden states [B,T,hidden] of the next `lengths` pending tokens of each row; None rows are padding."""
        steps = torch.arange(max(lengths))[None]
        starts = torch.tensor([active.cached if active else 0 for active in rows])[:, None]
        counts = torch.tensor(lengths)[:, None]
        positions = torch.where(steps < counts, starts + steps, 0)
        columns = torch.where(steps < counts, starts + steps, self._cache.bin)
        ids = torch.from_numpy(self._tokens)[slots, positions]
        width = int(positions.max()) + 1
        return self._model.hidden(ids, CachePlan(self._cache, slots, view, positions, columns, width))
