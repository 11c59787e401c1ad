"""Writes the table of readers in docs/exports.md: `python scripts/readers_page.py`.

`python -m tests.trainers.datasets_releases`, run with each release, prints what `tests/trainers/readers.json` holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "exports.md"
FIGURES = ROOT / "tests" / "trainers" / "readers.json"
BEGIN, END = "<!-- readers: scripts/readers_page.py -->\n", "<!-- end of readers -->\n"


def figures() -> dict[str, dict[str, list[str]]]:
    """By release of `datasets` and file, what came of plain rows, of the worst, and of texts of 10 MB."""
    found: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return found


def table() -> str:
    """A row for the files that fare alike, a column for each release: one word, or plain / worst."""
    releases = figures()
    alike: dict[tuple[str, ...], list[str]] = {}
    for label in next(iter(releases.values())):
        alike.setdefault(tuple(_cell(found[label]) for found in releases.values()), []).append(f"`{label}`")
    lines = [f"| files | {' | '.join(releases)} |", "|---" * (len(releases) + 1) + "|"]
    lines += [f"| {', '.join(labels)} | {' | '.join(cells)} |" for cells, labels in alike.items()]
    return "\n".join(lines) + "\n"


def _cell(outcomes: list[str]) -> str:
    return outcomes[0] if len(set(outcomes)) == 1 else " / ".join(outcomes)


if __name__ == "__main__":
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
