"""What a harness wrote down of its own run, in one form for all harnesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rolltap.contract.base import Integer, RequestBody

MAX_ENTRIES = 100_000
ID_CHARS = 256
PROBLEM_CHARS = 500
TOOL_CALLS = 1024

Id = Annotated[str, Field(max_length=ID_CHARS)]


@dataclass(frozen=True, slots=True)
class LogEntry(RequestBody):
    """A message of the log. The id is that of a reply as the server named it, or of the call that a tool answers.

    `tokens` is what the log says that a reply has; None or "" where it does not say.
    """

    role: Literal["user", "assistant", "tool"]
    id: Id = ""
    tokens: Integer | None = None
    tool_calls: Annotated[Sequence[Id], Field(max_length=TOOL_CALLS)] = ()


@dataclass(frozen=True, slots=True)
class HarnessLog(RequestBody):
    """The main conversation of a harness's own log, in order. Subagents and side calls may be missing.

    `problem` says why there is none. `complete`: the harness ended by itself, so its last replies must be here.
    """

    entries: Annotated[Sequence[LogEntry], Field(max_length=MAX_ENTRIES)] = ()
    problem: Annotated[str, Field(max_length=PROBLEM_CHARS)] = ""
    complete: bool = True
