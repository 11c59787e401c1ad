"""What a server finds out about itself and what it needs: `GET /diagnosis`, which `rolltap doctor --server` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table. `advice` is empty where nothing has to be done.

    With `healthy` False, something does not work as configured; a healthy part may still have advice.
    """

    what: str
    state: str
    advice: str = ""
    healthy: bool = True


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of the process that answered. `policies` are those that it serves."""

    version: str
    process: int
    host: str
    policies: Sequence[str]
    findings: Sequence[Finding]
