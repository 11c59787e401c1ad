"""The matrix harness x scenario: what is counted in a cell, what is known to break, and what the logs say of it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolltap import __version__
from rolltap.harnesses.base import Harness

from .house import Run

REPORT = Path(__file__).parents[2] / "reports" / "harnesses.json"

BreakCounts = Mapping[str, int]

KNOWN_BREAKS: Mapping[tuple[str, str], tuple[BreakCounts, str]] = {
    ("qwen-code", "resume"): (
        {"new_conversation": 1},
        "A resumed run rewrites its first message (git status, folder tree, date).",
    ),
    ("gemini-cli", "resume"): (
        {"new_conversation": 1},
        "A resumed run rewrites its first message and sends function responses three times.",
    ),
    ("openclaw", "dropped"): (
        {"thinking_dropped": 1},
        "After a failed request it goes on with a user message, and the template omits earlier thinking before one.",
    ),
}
"""(harness, scenario) → breaks by reason that the harness itself makes unavoidable, and why."""


@dataclass
class Cell:
    """`main` calls carry loss; `bridged` are those whose prompt begins with their parent's prompt and output. `check`
    is the verdict of the harness's own log."""

    harness: str
    release: str
    dialect: str
    scenario: str
    calls: int = 0
    main: int = 0
    bridged: int = 0
    aborted: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    check: str = ""

    @classmethod
    def of(cls, harness: Harness, scenario: str, run: Run) -> Cell:
        completed = [call for call in run.calls if call["outcome"] == "completed"]
        main = [call for call in completed if call["kind"] == "main"]
        return cls(
            harness.name,
            harness.package.version if harness.package else "",
            harness.dialect,
            scenario,
            calls=len(run.calls),
            main=len(main),
            bridged=sum(bridged(call, run) for call in main),
            aborted=sum(call["outcome"] == "aborted" for call in run.calls),
            breaks=dict(Counter(call["break_"]["reason"] for call in main if call["break_"])),
            seconds=round(sum(exit_.seconds for exit_ in run.exits), 1),
            check=run.check["verdict"],
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
    if parent is None or call["break_"] is not None:
        return False
    whole = parent["prompt_tokens"] + parent["output_tokens"]
    return call["shared"] == whole <= call["prompt_tokens"]


def write_report(results: Sequence[Mapping[str, Any]]) -> None:
    """The stage's results, which `scripts/harnesses_page.py` makes tables of."""
    REPORT.parent.mkdir(exist_ok=True)
    about = {"rolltap": __version__, "python": platform.python_version(), "cores": os.cpu_count(), "at": time.time()}
    REPORT.write_text(json.dumps({"cells": results, **about}, indent=1))
