"""How many values a body of JSON holds, counted before it is parsed.

What parsed JSON takes, in time and memory, goes by its values and not by its bytes: 3 MB of empty lists take seconds.
"""

from __future__ import annotations

from rolltap.errors import BodyTooLarge

MOST_VALUES = 500_000
"""Of a model call's body: at least as many as 100,000 messages have (`json_request.MAX_ITEMS`)."""

PIECE_BYTES = 256 << 10
"""How much is looked at in one step: between two steps other threads run."""


def check_values(body: bytes) -> None:
    """`BodyTooLarge` for JSON of more than `MOST_VALUES` values."""
    if len(body) > MOST_VALUES and count_values(body, MOST_VALUES) > MOST_VALUES:
        raise BodyTooLarge(f"the request body holds more than {MOST_VALUES:,} values; send fewer at a time")


def count_values(body: bytes, most: int) -> int:
    """The values in valid JSON, lists, objects and what they hold; above `most` it counts no further.

    What is no JSON has any count. Values in a list or object are one more than its commas, if it is not empty.
    """
    count, is_in_text, cut_escape = 1, False, b""
    for start in range(0, len(body), PIECE_BYTES):
        piece = cut_escape + body[start : start + PIECE_BYTES]
        cut_escape = b"\\" * ((len(piece) - len(piece.rstrip(b"\\"))) % 2)
        piece = piece.removesuffix(cut_escape).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')  # by turns outside and inside of text
        marks = b'"'.join(parts[is_in_text::2]).translate(None, b" \t\r\n")
        count += marks.count(b",") + marks.count(b"[") + marks.count(b"{") - marks.count(b"[]") - marks.count(b"{}")
        if count > most:
            break
        is_in_text ^= len(parts) % 2 == 0
    return count
