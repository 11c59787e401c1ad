"""What readers of JSON can't hold: one such value makes a whole file unreadable, or another one, for `datasets`.

Seen in all releases from 4.0 to 5.2: whole numbers past 64 bits are read as floats or refused ("Value is too big!"),
objects nested deeper than Arrow's schemas are refused, and a name with a NUL ends before it. Texts may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rolltap.errors import RowError

LARGEST = 2**63 - 1
DEEPEST = 50
"""Levels of a row's value. Arrow's limit is 64, and the lists and structs of messages take some of them."""

SUSPECT = re.compile(rb"\d{19}|\\u0000")
"""In every line that holds a number of more than 63 bits or a NUL."""


def check_line(line: bytes, values: Mapping[str, Any]) -> None:
    """Raises `RowError` if readers can't hold the row `values`, which `line` encodes."""
    if SUSPECT.search(line) or line.count(b"{") + line.count(b"[") > DEEPEST:
        check_values(values)


def check_values(values: Mapping[str, Any]) -> None:
    """Raises `RowError` for the first value that readers can't hold, and says where it is."""
    for name, value in values.items():
        if (problem := next(_problems(value, 1), None)) is not None:
            raise RowError(f"{name} has {problem}, which readers of JSON can't hold; --option arguments=text writes it")


def _problems(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        yield "a number of more than 64 bits"
    elif isinstance(value, (Mapping, list, tuple)):
        if depth > DEEPEST:
            yield f"more than {DEEPEST} levels"
            return
        if isinstance(value, Mapping):
            if any("\0" in str(key) for key in value):
                yield "a name with a NUL"
            value = value.values()
        for part in value:
            yield from _problems(part, depth + 1)
