"""Identifiers that sort by the time they were made.

An id is 20 characters of Crockford base 32: 10 of milliseconds since the epoch, 10 of randomness (50 bits). Within
one process ids are strictly increasing, so the ids of a session's calls give their order.
"""

from __future__ import annotations

import secrets
import threading
import time

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
ID_LENGTH = 20
_RANDOM_BITS = 50
_PAIRS = [first + second for first in ALPHABET for second in ALPHABET]
_SHIFTS = range((ID_LENGTH // 2 - 1) * 10, -1, -10)
"""Two characters are ten bits."""


class IdClock:
    """Makes strictly increasing ids, also when the wall clock steps back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0

    def next(self) -> str:
        with self._lock:
            fresh = (time.time_ns() // 1_000_000 << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
            self._last = max(fresh, self._last + 1)
            return _encode(self._last)


def _encode(value: int) -> str:
    return "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])


_clock = IdClock()


def new_id() -> str:
    """A fresh 20-character id, greater than every earlier one of this process."""
    return _clock.next()


def end_of_ids() -> str:
    """Greater than every id that was made until now, by a clock that is a day ahead. Imported names may be greater: to
    a reader that goes on from the greatest id they would be new for ever, and what is new later would be old."""
    return first_id_at(time.time() + 86_400)


def first_id_at(seconds: float) -> str:
    """The least id that can be made at this time (seconds since the epoch)."""
    return _encode(max(0, int(seconds * 1000)) << _RANDOM_BITS)
