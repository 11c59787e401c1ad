"""A group's page: its rollouts side by side, and where they part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolltap.proxy.viewer.session import ShownTurn
from rolltap.reading.types import GroupDetail, MessageView, RolloutDetail

SHOWN = 30
"""Calls of a rollout that its lane holds."""


@dataclass(frozen=True, slots=True)
class RolloutLane:
    """A rollout's turns. `parts_at` is the first one whose text differs between two lanes, -1 if none does.

    `more` are not shown.
    """

    detail: RolloutDetail
    turns: Sequence[ShownTurn]
    parts_at: int
    more: int


def lanes_of(group: GroupDetail, turns: Sequence[Sequence[ShownTurn]]) -> list[RolloutLane]:
    """The lanes in the group's order. The first turns' requests are the task, which all have in common."""
    longest = max(map(len, turns), default=0)
    different = (at for at in range(longest) if len({_said(lane[at]) for lane in turns if at < len(lane)}) > 1)
    parts_at = next(different, -1)
    return [
        RolloutLane(detail, members[:SHOWN], parts_at, max(0, len(members) - SHOWN))
        for detail, members in zip(group.rollouts, turns, strict=True)
    ]


def _said(turn: ShownTurn) -> tuple[object, ...]:
    messages: tuple[MessageView | None, ...] = (*(turn.new if turn.entry.number > 1 else ()), turn.reply)
    return tuple(
        (message.role, tuple((part.kind, part.name, part.text) for part in message.parts))
        for message in messages
        if message is not None
    )


def spread(rewards: Sequence[float | None]) -> str:
    """A group's rewards as a row of marks, the best first: full, half and empty ones, a dash where there is none."""
    numbers = sorted((reward for reward in rewards if reward is not None), reverse=True)
    low, high = min([0.0, *numbers]), max([1.0, *numbers])
    marks = ["○◔◑◕●"[round((reward - low) / (high - low) * 4)] for reward in numbers]
    return "".join(marks) + "–" * (len(rewards) - len(numbers))
