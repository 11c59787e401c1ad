"""A trainer's steps, from the file that it writes itself: a JSON object a line, as our `metrics.jsonl`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from rolltap.reading.types import TrainerStep
from rolltap.settings import Settings

MAX_BYTES = 32 << 20
"""Bytes at the end of a file that are read."""

StepFiles = Mapping[str, Path]
"""The file of each policy's trainer; that of "" is of every other policy."""


def step_files(settings: Settings) -> dict[str, Path]:
    """Returns the files that the settings name (`metrics` of a policy)."""
    return {name: Path(policy.metrics).expanduser() for name, policy in settings.policies.items() if policy.metrics}


def changed_at(path: Path | None) -> float | None:
    """Returns when a file last changed; None if there is none."""
    try:
        return path.stat().st_mtime if path is not None else None
    except OSError:
        return None


def read_steps(path: Path | None) -> list[TrainerStep]:
    """Returns the steps of a file in their order, each with its last attempt. Empty if there is no such file.

    Lines that can't be read are left out: the last may be cut off while the trainer writes it.
    """
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_BYTES))
            lines = file.read(MAX_BYTES).splitlines()
    except OSError:
        return []
    by_step: dict[int, TrainerStep] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and (step := _number(row.pop("step", None))) is not None and step == int(step):
            numbers = {name: number for name, value in row.items() if (number := _number(value)) is not None}
            by_step[int(step)] = TrainerStep(int(step), numbers)
    return [by_step[step] for step in sorted(by_step)]


def _number(value: object) -> float | None:
    """Returns a finite number; None for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer that no float can hold
        return None
    return number if math.isfinite(number) else None
