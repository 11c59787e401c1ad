"""Finds a request's stop strings in a reply's text."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request; false without any. `longest` is the length of the longest one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self.longest = max(map(len, stops), default=0)

    def __bool__(self) -> bool:
        return bool(self._stops)

    def first(self, text: str) -> tuple[int, str | None]:
        """The index of the first stop string, and the string; (length, None) if there is none."""
        return min(((text.index(stop), stop) for stop in self._stops if stop in text), default=(len(text), None))

    def possible(self, text: str) -> int:
        """The number of characters at the end that may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
