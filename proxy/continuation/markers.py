"""The token ids that separate a family's channels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Markers:
    """The token ids that separate a family's channels; None if the family has no such token.

    `beginnings`: how the text of a reply begins that is a tool call in plain text; None if replies can be read only
    when they are complete. `call_head` matches the text between a call's opening token and its arguments, if these are
    JSON. `reasoning_label` is what a family writes at the beginning of its thinking.
    """

    reasoning_open: int | None
    reasoning_close: int | None
    tool_open: int | None
    tool_close: int | None
    beginnings: tuple[str, ...] | None = ()
    call_head: re.Pattern[str] | None = None
    reasoning_label: str = ""

    def opens_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether the generation prompt opens a thinking block."""
        for token in reversed(prompt[-64:]):
            if token == self.reasoning_open:
                return True
            if token == self.reasoning_close:
                return False
        return False
