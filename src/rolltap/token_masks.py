"""Sampling masks of any size: the ids that a grammar left for each token. Needs only numpy.

Two arrays of a call or segment hold them. `mask_rows` int32 has a number a token: `FREE` if it was drawn from all ids;
`-2 - id` if only `id` was left (the token was forced); else the offset of its set in `mask_table` int32 [W], the one
extra array that has no row a token. A set is written once, however many tokens were drawn from it, as the shorter of
two forms: its size and its ids in order; or minus the number of words, and that many words of 32 bits, id 0 in the
lowest bit of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

SAMPLING_MASK = "sampling_mask"
"""The extra array [T, K] with masks as lists of ids, padded with -1, from engines that tell short ones."""

MASK_ROWS, MASK_TABLE = "mask_rows", "mask_table"

FREE = -1
"""The row of a token that was drawn from all ids."""

LONGEST_TABLE = 1 << 20
"""Words of a call's table (4 MiB): 220 large sets of a vocabulary of 150,000. A longer one is not kept."""

Int32 = NDArray[np.int32]


class MaskWriter:
    """Writes the sets of one call, in order. `full`: the table is too long, so that the call has no masks."""

    def __init__(self) -> None:
        self.full = False
        self._size = 0
        self._offsets: dict[bytes, int] = {}
        self._new: list[Int32] = []

    def add(self, words: Int32) -> int:
        """The row of the set with these bits, int32 [ceil(V / 32)]. It must not be empty."""
        key = words.tobytes()
        if (known := self._offsets.get(key)) is not None:
            return known
        ids = ids_of_words(words)
        if len(ids) == 1:
            row = -2 - int(ids[0])
        else:
            row = self._size
            is_short = len(ids) < len(words)
            head = len(ids) if is_short else -len(words)
            entry = np.concatenate([np.array([head], np.int32), ids if is_short else words.astype(np.int32)])
            self._size += len(entry)
            self.full = self.full or self._size > LONGEST_TABLE
            self._new.append(entry)
        self._offsets[key] = row
        return row

    def take(self) -> Int32:
        """What was added to the table since the last call."""
        new, self._new = self._new, []
        return np.concatenate(new) if new else np.empty(0, np.int32)


def ids_of_words(words: Int32) -> Int32:
    """The ids of a bitmap, in order."""
    bits = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)


def ids_of(row: int, table: Int32) -> Int32 | None:
    """The ids of a row, in order; None if all. Raises `IndexError` or `ValueError` if the table has no such set."""
    if row == FREE:
        return None
    if row < FREE:
        return np.array([-2 - row], np.int32)
    size = int(table[row])
    entry = table[row + 1 : row + 1 + abs(size)]
    if not size or len(entry) != abs(size):
        raise ValueError(f"the table of sampling masks has no set at {row}")
    return entry if size > 0 else ids_of_words(entry)


def per_token(
    extras: Mapping[str, np.ndarray], change: Callable[[str, np.ndarray], np.ndarray]
) -> dict[str, np.ndarray]:
    """The extra arrays, each that has a row a token changed."""
    return {name: array if name == MASK_TABLE else change(name, array) for name, array in extras.items()}


def joined(parts: Sequence[tuple[Int32, Int32]]) -> tuple[Int32, Int32]:
    """Rows and tables as one: the rows follow each other, and a table that comes again is written once."""
    at: dict[bytes, int] = {}
    rows: list[Int32] = []
    tables: list[Int32] = []
    size = 0
    for own_rows, table in parts:
        offset = at.setdefault(table.tobytes(), size)
        if offset == size and len(table):
            tables.append(table)
            size += len(table)
        rows.append(np.where(own_rows >= 0, own_rows + np.int32(offset), own_rows).astype(np.int32))
    empty = np.empty(0, np.int32)
    return np.concatenate([empty, *rows]), np.concatenate([empty, *tables])
