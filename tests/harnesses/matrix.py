"""The matrix harness x scenario: what is counted in a cell, and what is known to break, with the reason."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rolltap import __version__
from rolltap.harnesses.registry import HARNESSES

from .house import Run

REPORT = Path(__file__).parents[2] / "reports" / "harnesses.json"

BreakCounts = Mapping[str, int]

KNOWN_BREAKS: Mapping[tuple[str, str], tuple[BreakCounts, str]] = {
    ("qwen-code", "resume"): (
        {"new_conversation": 1, "tools_changed": 1},
        "A resumed run rewrites its first message (git status, folder tree, date). After it, an agent of its own looks "
        "for what to remember, with tools of its own.",
    ),
    ("gemini-cli", "resume"): (
        {"new_conversation": 1},
        "A resumed run rewrites its first message and sends function responses three times.",
    ),
}
"""(harness, scenario) → breaks by reason that the harness itself makes unavoidable, and why."""


@dataclass
class Cell:
    """`main` calls carry loss; `bridged` are those whose prompt begins with their parent's prompt and output."""

    harness: str
    dialect: str
    scenario: str
    calls: int = 0
    main: int = 0
    bridged: int = 0
    aborted: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @classmethod
    def of(cls, harness: str, dialect: str, scenario: str, run: Run) -> Cell:
        completed = [call for call in run.calls if call["outcome"] == "completed"]
        main = [call for call in completed if call["kind"] == "main"]
        return cls(
            harness,
            dialect,
            scenario,
            calls=len(run.calls),
            main=len(main),
            bridged=sum(bridged(call, run) for call in main),
            aborted=sum(call["outcome"] == "aborted" for call in run.calls),
            breaks=dict(Counter(call["break"]["reason"] for call in main if call["break"])),
            seconds=round(sum(exit_.seconds for exit_ in run.exits), 1),
        )

    def shown(self) -> str:
        """`bridged/continuations`, and the breaks."""
        text = f"{self.bridged}/{max(0, self.main - 1)}"
        if self.breaks:
            text += " " + ", ".join(f"{count} {reason}" for reason, count in sorted(self.breaks.items()))
        return text


def bridged(call: dict, run: Run) -> bool:
    """By the record and by the engine's own journal, which compares token ids and knows nothing of messages."""
    parents = {known["id"]: known for known in run.calls}
    parent = parents.get(call["parent_id"])
    if parent is None or call["break"] is not None:
        return False
    whole = parent["prompt_tokens"] + parent["output_tokens"]
    return call["shared"] == whole <= call["prompt_tokens"]


def write_report(cells: list[Cell]) -> None:
    """The figures that the docs' table is made from."""
    REPORT.parent.mkdir(exist_ok=True)
    versions = {
        name: f"{harness.package.name} {harness.package.version}"
        for name, harness in HARNESSES.items()
        if harness.package is not None
    }
    about = {"rolltap": __version__, "python": platform.python_version(), "cores": os.cpu_count(), "at": time.time()}
    REPORT.write_text(json.dumps({"cells": [asdict(cell) for cell in cells], "releases": versions, **about}, indent=1))


def table(cells: list[Cell]) -> str:
    """The matrix as Markdown."""
    scenarios = list(dict.fromkeys(cell.scenario for cell in cells))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        rows.setdefault(f"{cell.harness} ({cell.dialect})", {})[cell.scenario] = cell.shown()
    head = "| harness | " + " | ".join(scenarios) + " |\n" + "|---" * (len(scenarios) + 1) + "|\n"
    lines = [f"| {name} | " + " | ".join(row.get(one, "") for one in scenarios) + " |" for name, row in rows.items()]
    return head + "\n".join(lines) + "\n"
