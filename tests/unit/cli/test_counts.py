"""Counts are said as people say them, and the table of submissions fits a terminal of 80 columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from rolltap.cli.tasks import submissions_table
from rolltap.ids import new_id
from rolltap.wording import counted

from .plane import submission


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 sessions"), (1, "1 session"), (2, "2 sessions"), (12345, "12,345 sessions")]
)
def test_one_is_singular(number: int, text: str) -> None:
    assert counted(number, "session") == text


def test_submissions_keep_their_headings_at_80_columns() -> None:
    one = submission(
        new_id(),
        policy="qwen3-coder-30b",
        tasks=500,
        queued=120,
        n=8,
        rollouts={"succeeded": 2900, "failed": 40, "timed_out": 12, "running": 88},
        reward_mean=0.4375,
    )
    console = Console(width=80, record=True)
    console.print(submissions_table([one, replace(one, cancelled=True, queued=0)]))
    lines = console.export_text().splitlines()
    heading = next(line for line in lines if "submission" in line)
    assert heading.split() == ["submission", "policy", "tasks", "rollouts", "ended", "as", "reward"]
    assert max(map(len, lines)) <= 80
    assert one.id in "\n".join(lines)
    assert "…" not in "\n".join(lines)
