"""Writes the tables of readers in docs/exports.md: `python scripts/readers_page.py`.

`python -m tests.trainers.datasets_releases`, run with each release, prints what `tests/trainers/readers.json` holds.
The releases of consumers are those of their environments, `scripts/trainers.sh`.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.consumers import CONSUMERS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "exports.md"
FIGURES = ROOT / "tests" / "trainers" / "readers.json"
ENVIRONMENTS = ROOT / "scripts" / "trainers.sh"
PACKAGES = {"llama-factory": "llamafactory"}
"""A consumer's package, where it has another name."""

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


def consumers() -> str:
    """A row for each consumer and format: the release that was tried, its `datasets`, and how that reads the files."""
    script, found = ENVIRONMENTS.read_text(encoding="utf-8"), figures()
    lines = ["| `--for` | format | tested | `datasets` | read |", "|---|---|---|---|---|"]
    for name, consumer in CONSUMERS.items():
        package = PACKAGES.get(name, name)
        own = re.search(rf"^  {package}-(\S+)\)\s+packages=\(([^)]*)\)", script, re.MULTILINE)
        release = f"{package} {own[1] if own else version(package)}" if "datasets-" not in name else ""
        pinned = re.search(r"datasets==(\S+)", own[2]) if own else None
        datasets = (
            pinned[1] if pinned else max(found) if "datasets-" not in name else name.removeprefix("datasets-") + ".0"
        )
        for format, options in consumer.formats.items():
            container = consumer.container or exporter_named(format).containers[0]
            label = " ".join(filter(None, [format, options.get("arguments", ""), container]))
            cell = _cell(found[datasets][label])
            lines.append(f"| `{name}` | `{label}` | {release} | {datasets} | {cell} |")
    return "\n".join(lines) + "\n"


def _cell(outcomes: list[str]) -> str:
    """Texts of 10 MB are read exactly everywhere (a test), so they have no word of their own."""
    return " / ".join(dict.fromkeys(outcomes[:2]))


if __name__ == "__main__":
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{consumers()}\n{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")
