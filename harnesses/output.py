"""The output of runs, within a limit: the beginning, a line with the number of omitted bytes, and the end."""

from __future__ import annotations

from pathlib import Path

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
    lines = output.strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"


class Transcript:
    """The output of an evaluation's steps, in order."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, step: str, output: str) -> None:
        self._parts.append(f"=== {step} ===\n{output.rstrip()}\n")

    def __str__(self) -> str:
        return "\n".join(self._parts)
