"""The type of a log reader, and helpers that read the fields of an untrusted log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rolltap.contract.admin import LogEntry
from rolltap.harnesses.logs.files import LeftFiles


@dataclass(frozen=True, slots=True)
class RunFolders:
    """The folders of an ended run: its HOME and its working copy."""

    home: LeftFiles
    work: LeftFiles


LogReader = Callable[[RunFolders], Iterable[LogEntry]]
"""Returns the entries of the main conversation in a harness's log, in order; nothing if there is no log.

Raises `LogUnreadable` if it can't parse the log. Wrong types and missing fields may also raise `LookupError`,
`TypeError`, `ValueError` or `AttributeError`: an agent may have written the log.
"""


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def items(value: Any) -> list[Mapping[str, Any]]:
    """The JSON objects of a JSON list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """The value if it is a text, else ""."""
    return value if isinstance(value, str) else ""


def count(value: Any) -> int | None:
    """The value if it is a count, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None
