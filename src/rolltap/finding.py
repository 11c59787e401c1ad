"""What is wrong or odd about a session; it travels with the trajectory. `rolltap.reconstructor.findings` finds it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    """How bad a finding is, the worst first."""

    FATAL = "fatal"  # can't be trained
    WARN = "warn"  # may teach the wrong thing
    INFO = "info"


@dataclass(frozen=True, slots=True)
class SessionFinding:
    """Something that is wrong or odd about a session; `count` calls show it. `name` is of a closed list."""

    name: str
    grade: Grade
    count: int
    text: str
