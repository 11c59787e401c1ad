"""Counts the values in a JSON body before it is parsed.

Time and memory for parsing depend on the number of values, not on the bytes: 3 MB of empty lists take seconds.
"""

from __future__ import annotations

from rolltap.errors import BodyTooLarge

MOST_VALUES = 500_000
"""Limit for a model call's body. 100,000 messages (`protocols.requests.MAX_ITEMS`) fit in it."""

PIECE_BYTES = 256 << 10
"""Bytes scanned in one step. Other threads can run between two steps."""


def check_values(body: bytes) -> None:
    """Raises `BodyTooLarge` for JSON with more than `MOST_VALUES` values."""
    if len(body) > MOST_VALUES and count_values(body, MOST_VALUES) > MOST_VALUES:
        raise BodyTooLarge(f"the request body holds more than {MOST_VALUES:,} values; send fewer at a time")


def count_values(body: bytes, most: int) -> int:
    """The number of values in valid JSON: lists, objects, and their elements. Stops counting above `most`.

    A non-empty list or object has one more element than commas. For invalid JSON the count is meaningless.
    """
    count, is_in_text, cut_escape = 1, False, b""
    for start in range(0, len(body), PIECE_BYTES):
        piece = cut_escape + body[start : start + PIECE_BYTES]
        cut_escape = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)
        piece = piece.removesuffix(cut_escape).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')  # alternately outside and inside of strings
        marks = b'"'.join(parts[is_in_text::2]).translate(None, b" \t\r\n")
        count += marks.count(b",") + marks.count(b"[") + marks.count(b"{") - marks.count(b"[]") - marks.count(b"{}")
        if count > most:
            break
        is_in_text ^= len(parts) % 2 == 0
    return count
