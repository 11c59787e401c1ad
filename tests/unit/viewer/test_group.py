"""A group's lanes part where two rollouts say something else, and nowhere where none does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rolltap.proxy.viewer.runs import lanes_of
from rolltap.proxy.viewer.session import ShownTurn
from rolltap.reading.types import MessageView, PartView


def lane(*replies: str) -> list[ShownTurn]:
    """A rollout's turns, by what the model said in each."""
    entries: list[Any] = [SimpleNamespace(number=number) for number in range(1, len(replies) + 1)]
    messages = [MessageView("assistant", (PartView("text", reply),)) for reply in replies]
    return [ShownTurn(entry, (), message, {}) for entry, message in zip(entries, messages, strict=True)]


@pytest.mark.parametrize(
    ("lanes", "parts_at"),
    [
        ([lane("a", "b"), lane("a", "c")], 1),
        ([lane("a"), lane("b")], 0),
        ([lane("a", "b"), lane("a", "b")], -1),
        ([lane("a"), lane("a", "b")], -1),
        ([lane("a"), lane("a", "b"), lane("a", "c")], 1),
        ([lane("a", "b"), []], -1),
        ([lane("a")], -1),
        ([[], []], -1),
    ],
)
def test_they_part_where_two_differ(lanes: list[list[ShownTurn]], parts_at: int):
    group: Any = SimpleNamespace(rollouts=[None] * len(lanes))
    assert {each.parts_at for each in lanes_of(group, lanes)} == {parts_at}
