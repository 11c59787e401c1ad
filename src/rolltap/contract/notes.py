"""Scores, labels, comments and tags that are added to what is on record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from rolltap.contract.base import RequestBody
from rolltap.errors import InvalidRequest

NoteKind = Literal["score", "label", "comment", "tag"]
NoteValue = float | str | None
NOTE_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class NewNote(RequestBody):
    """A note to append, on the session `session_id` or on one call. `author` says whose it is."""

    kind: NoteKind
    name: Annotated[str, Field(max_length=256)] = ""
    value: float | Annotated[str, Field(max_length=NOTE_CHARS)] | None = None
    session_id: str | None = None
    call_id: str | None = None
    author: Annotated[str, Field(max_length=256)] = ""

    def __post_init__(self) -> None:
        if (self.session_id is None) == (self.call_id is None):
            raise InvalidRequest("a note is on a session or on a call: give session_id or call_id", param="session_id")
        number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        if self.kind == "score" and not (number and math.isfinite(self.value)):  # type: ignore[arg-type]
            raise InvalidRequest("a score's value is a finite number", param="value")
        if self.kind != "score" and not isinstance(self.value, str | None):
            raise InvalidRequest(f"a {self.kind}'s value is a text", param="value")
        if self.kind == "comment" and not self.value:
            raise InvalidRequest("a comment's value is its text", param="value")
        if self.kind != "comment" and not self.name:
            raise InvalidRequest(f"a {self.kind} has a name", param="name")
        if self.kind == "tag" and self.call_id is not None:
            raise InvalidRequest("tags are on sessions; label a call instead", param="call_id")
