"""What runs print and evaluators say, as the server can store it.

An agent decides what its run prints. A report that the server refused would save a bad rollout from its reward, so
every text is made storable, and kept within a limit: its beginning, a line with the size of what is left out, its end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltap.contract.admin import DETAIL_BYTES, EVALUATION_CHARS

LARGEST_INTEGER = 2**63

KEPT_BYTES = 1 << 20
"""The most bytes kept of one run's output."""


def read_output(path: Path, limit: int = KEPT_BYTES) -> str:
    """The file's text. If it has more than `limit` bytes: the first and the last half of them. "" without a file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        left_out = file.seek(0, 2) - limit
        file.seek(0)
        if left_out <= 0:
            return file.read().decode("utf-8", errors="replace")
        head = file.read(limit // 2)
        file.seek(left_out, 1)
        tail = file.read(limit - len(head))
    marker = f"\n[... {left_out:,} bytes are left out ...]\n".encode()
    return (head + marker + tail).decode("utf-8", errors="replace")


def last_line(output: str) -> str:
    """The last line of an output, at most 300 characters, for a reason."""
    lines = storable(output).strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"


def storable(text: str) -> str:
    """The text with U+FFFD for what no store can hold: NUL, and half of a surrogate pair."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace").replace("\0", "\ufffd")


def storable_detail(detail: Mapping[str, Any]) -> dict[str, Any]:
    """A reward's detail as JSON that the server accepts. One that is too large says only that."""
    stored = {storable(str(name)): _storable_value(value) for name, value in detail.items()}
    size = len(json.dumps(stored))
    return stored if size <= DETAIL_BYTES else {"left_out": f"{size:,} bytes of detail are more than {DETAIL_BYTES:,}"}


def _storable_value(value: Any) -> Any:
    match value:
        case str():
            return storable(value)
        case Mapping():
            return {storable(str(name)): _storable_value(item) for name, item in value.items()}
        case list() | tuple():
            return [_storable_value(item) for item in value]
        case float() if not math.isfinite(value):
            return str(value)
        case bool() | None | float():
            return value
        case int() if -LARGEST_INTEGER <= value < LARGEST_INTEGER:
            return value
        case _:
            return storable(str(value))


def shortened(text: str, limit: int) -> str:
    """The text, or its first and last characters and how many are left out between them."""
    if len(text) <= limit:
        return text
    marker = f"\n[... {len(text) - limit:,} characters are left out ...]\n"
    half = (limit - len(marker)) // 2
    return text[:half] + marker + text[-half:]


class Transcript:
    """The output of an evaluation's steps, in order."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, step: str, output: str) -> None:
        self._parts.append(f"=== {step} ===\n{shortened(storable(output).rstrip(), KEPT_BYTES)}\n")

    def __str__(self) -> str:
        return shortened("\n".join(self._parts), EVALUATION_CHARS)
