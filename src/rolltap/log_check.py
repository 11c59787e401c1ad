"""Whether a harness's own log of a session agrees with the record. It stands on the session and its trajectory.

`rolltap.harnesses.logs` reads the logs, `rolltap.reading.log_check` compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class LogVerdict(StrEnum):
    """The outcome of a comparison."""

    MATCH = "match"
    MISMATCH = "mismatch"
    NONE = "none"  # nothing was compared


@dataclass(frozen=True, slots=True)
class LogCheck:
    """A verdict, and in a sentence what differs (`mismatch`), why nothing was compared (`none`), or what agrees."""

    verdict: LogVerdict = LogVerdict.NONE
    text: str = "no log of the harness was read"


UNCHECKED = LogCheck()
"""What stands on a session until a log is compared."""
