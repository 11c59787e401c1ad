"""Counts the values of MessagePack without making them: an empty list takes one byte there, and 56 in memory."""

from __future__ import annotations

_FIXED = {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5}
_FIXED |= {0xD3: 9, 0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18, 0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
"""The bytes of a value, or of the head of a list or map, by its first byte."""
_MEASURED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_MEASURED |= {0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
"""The bytes of a length, and those between it and so many bytes."""


def count_values(data: bytes, most: int) -> int:
    """The number of values in `data`, lists and maps and what is in them; stops above `most`. It means nothing if
    `data` is no MessagePack."""
    at = count = 0
    while at < len(data) and count <= most:
        first = data[at]
        count += 1
        if first < 0xA0 or first >= 0xE0:
            at += 1
        elif first < 0xC0:
            at += 1 + (first & 0x1F)
        elif first in _MEASURED:
            width, between = _MEASURED[first]
            at += 1 + width + between + int.from_bytes(data[at + 1 : at + 1 + width])
        else:
            at += _FIXED.get(first, 1)
    return count
