"""Finds tool-call blocks in token ids."""

from __future__ import annotations

from collections.abc import Sequence


def find_blocks(ids: Sequence[int], opening: int | None, closing: int | None, start: int = 0) -> list[slice]:
    """The places of the blocks in `ids` from `start`.

    A block begins with the token `opening`. It ends with `closing` or, if that is None, before the next `opening`. The
    last block may be unclosed.
    """
    blocks: list[slice] = []
    opened: int | None = None
    for at in range(start, len(ids)):
        if ids[at] == closing and opened is not None:
            blocks.append(slice(opened, at + 1))
            opened = None
        elif ids[at] == opening and (opened is None or closing is None):
            blocks += [] if opened is None else [slice(opened, at)]
            opened = at
    return blocks if opened is None else [*blocks, slice(opened, len(ids))]
