"""The key-value cache of the engine's slots, as transformers' models use one.

A slot's columns `[0, n)` hold its first n tokens. One column more takes the writes of padding, and is never attended
to. Columns are added by doubling as sequences grow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

FIRST_COLUMNS = 256


class SlotCache(Cache):
    """Keys and values of `slots` sequences of at most `length` tokens.

    `place` says where the next forward pass stands: `rows` [B,1] are slots, `view` the same as a slice where they are
    contiguous (a view costs nothing, a gathered copy does), `positions` [B,T] the places of the new tokens in their
    sequences, `columns` [B,T] the columns that are written (`columns_held` for padding).
    """

    def __init__(self, layers: int, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self.columns_held = min(length, FIRST_COLUMNS)
        self.rows = self.positions = self.columns = torch.zeros(1, 1, dtype=torch.long)
        self.view: slice | Tensor = slice(0, 1)
        self.width = 1
        self._slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def place(self, rows: Tensor, view: slice | Tensor, positions: Tensor, columns: Tensor, width: int) -> None:
        """`width`: the columns that the pass attends to."""
        self.rows, self.view, self.positions, self.columns, self.width = rows, view, positions, columns, width

    def grow(self, columns: int) -> None:
        """Makes room for `columns` tokens a slot; what is cached stays."""
        if columns > self.columns_held:
            before, self.columns_held = self.columns_held, min(self.length, max(columns, 2 * self.columns_held))
            for layer in self._slot_layers:
                layer.grow(before)


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, heads, columns + 1, width of a head]."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def grow(self, columns: int) -> None:
        """Makes room as the cache says; its first `columns` stay."""
        for name in ("keys", "values") if self.is_initialized else ():
            old = getattr(self, name)
            new = self._empty(old)
            new[:, :, :columns] = old[:, :, :columns]
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new tokens' [B,heads,T,width]; returns those of all columns that are attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        at = self._cache
        self.keys[at.rows, :, at.columns] = key_states.transpose(1, 2)
        self.values[at.rows, :, at.columns] = value_states.transpose(1, 2)
        return self.keys[at.view, :, : at.width], self.values[at.view, :, : at.width]

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, width = like.shape
        return like.new_zeros(self._cache.slots, heads, self._cache.columns_held + 1, width)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        return self._cache.width

    def get_max_length(self) -> int:
        return self._cache.length
