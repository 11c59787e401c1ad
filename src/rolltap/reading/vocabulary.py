"""Converts token ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rolltap.types import Int32

UNFINISHED = "\ufffd"
LONGEST_SPREAD = 4
"""A character of UTF-8 is spread over at most this many tokens."""

KEPT_PIECES = 1 << 18


class Vocabulary:
    """The text of a tokenizer's ids. `decode` maps ids to their text, special tokens included.

    A piece is what its token adds to the text before it, so the pieces of a sequence join to its text. If a character
    is spread over several tokens, the last of them has it and the others are empty.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._anchor = self._find_anchor()
        self._pieces: dict[int, str | None] = {}

    def pieces(self, ids: Int32 | Sequence[int]) -> list[str]:
        texts: list[str] = []
        pending: list[int] = []
        for id in np.asarray(ids).tolist():
            piece = self.piece(id) if not pending else None
            if piece is not None:
                texts.append(piece)
                continue
            pending.append(id)
            text = self._text(pending)
            if text.endswith(UNFINISHED) and len(pending) < LONGEST_SPREAD:
                texts.append("")
            else:
                texts.append(text)
                pending = []
        if pending and texts:
            texts[-1] = self._text(pending)
        return texts

    def piece(self, id: int) -> str | None:
        """Returns the text of one token by itself; None if it is only a part of a character."""
        if id not in self._pieces:
            if len(self._pieces) >= KEPT_PIECES:
                self._pieces.clear()
            text = self._text([id])
            self._pieces[id] = None if UNFINISHED in text else text
        return self._pieces[id]

    def _text(self, ids: Sequence[int]) -> str:
        """Returns what the ids add after an ordinary token: some tokenizers drop a text's first space."""
        anchor, length = self._anchor
        return self._decode([*anchor, *ids])[length:]

    def _find_anchor(self) -> tuple[list[int], int]:
        """Returns a token with a plain text, and that text's length."""
        for id in range(200):
            text = self._decode([id])
            if len(text) == 1 and text.isascii() and text.isalnum():
                return [id], 1
        return [], 0
