"""`--score` and `--group-by`: rewards and groups for recorded sessions without a rollout.

A session's score (`rolltap.open(...).score`) is its reward. A tag, or the opening of its conversation, is its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.errors import DatasetError

BY_OPENING = "opening"
BY_TAG = "tag."


@dataclass(frozen=True, slots=True)
class Grouping:
    """`score`: name of the score that is the reward. `by`: "opening" or "tag.NAME". Empty: not used."""

    score: str = ""
    by: str = ""

    def __post_init__(self) -> None:
        if self.by and self.by != BY_OPENING and not (self.by.startswith(BY_TAG) and self.tag):
            raise DatasetError(f"--group-by: expected opening or tag.NAME, not {self.by!r}")

    @property
    def tag(self) -> str:
        """The name of the grouping tag; "" if there is none."""
        return self.by.removeprefix(BY_TAG) if self.by.startswith(BY_TAG) else ""

    def of_tags(self, tags: Mapping[str, str]) -> str:
        """The group for a session's tags; "" if the grouping tag is missing."""
        return f"{self.tag}={tags[self.tag]}" if self.tag in tags else ""
