"""Regular expressions in time linear in the text: for patterns of users on text that a model wrote.

`re` backtracks: `(a+)+$` on thirty letters holds a process for minutes. RE2 does not; its syntax is Python's without
look-around and back-references, and its `\\w`, `\\d`, `\\s` and `\\b` mean ASCII.
"""

from __future__ import annotations

import time

import re2

from rolltap.errors import InvalidRequest

MOST_CHARACTERS = 1000
MOST_BYTES = 8 << 20
"""Memory of a compiled pattern and its automata."""
SEARCH_S = 2.0
"""Each search takes time linear in the text, but a match may be found only by reading all that follows it."""


class LinearPattern:
    """A compiled pattern. Raises `InvalidRequest` for one that is none, is too long, or needs backtracking."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MOST_CHARACTERS:
            raise InvalidRequest(f"a pattern has at most {MOST_CHARACTERS:,} characters, not {len(pattern):,}")
        options = re2.Options()
        options.log_errors = False
        options.max_mem = MOST_BYTES
        try:
            self._compiled = re2.compile(pattern.encode(), options)
        except re2.error as error:
            reason = error.args[0].decode(errors="replace") if error.args else "it can't be read"
            raise InvalidRequest(f"{pattern[:80]!r} is no regular expression of RE2: {reason}") from None

    def spans(self, data: bytes, seconds: float = SEARCH_S) -> tuple[list[tuple[int, int]], bool]:
        """The matches in UTF-8 `data` that are not empty, in bytes, from left to right, and whether all of it was
        searched within `seconds`. A byte that is no part of a character matches nothing."""
        found: list[tuple[int, int]] = []
        deadline = time.monotonic() + seconds
        for match in self._compiled.finditer(data):
            start, end = match.span()
            if start < end:
                found.append((start, end))
            if time.monotonic() > deadline:
                return found, False
        return found, True
