"""`--score` and `--group-by`: recorded sessions that belong to no rollout, judged and compared like rollouts.

A session's score (`rolltap.open(...).score`) stands for its reward; a tag, or what it begins with, for its group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.errors import DatasetError

BY_OPENING = "opening"
BY_TAG = "tag."


@dataclass(frozen=True, slots=True)
class Grouping:
    """`score` names the score that is a session's reward, `by` is "opening" or "tag.NAME"; empty: neither."""

    score: str = ""
    by: str = ""

    def __post_init__(self) -> None:
        if self.by and self.by != BY_OPENING and not (self.by.startswith(BY_TAG) and self.tag):
            raise DatasetError(f"--group-by: want opening or tag.NAME, not {self.by!r}")

    @property
    def tag(self) -> str:
        """The tag that groups; "" where none does."""
        return self.by.removeprefix(BY_TAG) if self.by.startswith(BY_TAG) else ""

    def of_tags(self, tags: Mapping[str, str]) -> str:
        """The group that a session's tags name; "" for none."""
        return f"{self.tag}={tags[self.tag]}" if self.tag in tags else ""
