"""A group's page: its rollouts side by side, and the turn from which they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolltap.proxy.viewer.session import ShownTurn
from rolltap.reading.types import GroupDetail, MessageView, RolloutDetail

SHOWN = 30
"""Maximum calls of a rollout in its lane."""


@dataclass(frozen=True, slots=True)
class RolloutLane:
    """A rollout's turns. `parts_at`: index of the first turn whose text differs between two lanes, -1 without one.

    `more`: number of turns that are not shown.
    """

    detail: RolloutDetail
    turns: Sequence[ShownTurn]
    parts_at: int
    more: int


def lanes_of(group: GroupDetail, turns: Sequence[Sequence[ShownTurn]]) -> list[RolloutLane]:
    """Returns the lanes in the group's order. The requests of the first turns are the task, which all lanes share."""
    longest = max(map(len, turns), default=0)
    differing = (i for i in range(longest) if len({_compared_content(lane[i]) for lane in turns if i < len(lane)}) > 1)
    parts_at = next(differing, -1)
    return [
        RolloutLane(detail, members[:SHOWN], parts_at, max(0, len(members) - SHOWN))
        for detail, members in zip(group.rollouts, turns, strict=True)
    ]


def _compared_content(turn: ShownTurn) -> tuple[object, ...]:
    messages: tuple[MessageView | None, ...] = (*(turn.new if turn.entry.number > 1 else ()), turn.reply)
    return tuple(
        (message.role, tuple((part.kind, part.name, part.text) for part in message.parts))
        for message in messages
        if message is not None
    )


def spread(rewards: Sequence[float | None]) -> str:
    """Renders a group's rewards as a row of marks, best first: full, half and empty ones, a dash for none."""
    numbers = sorted((reward for reward in rewards if reward is not None), reverse=True)
    low, high = min([0.0, *numbers]), max([1.0, *numbers])
    marks = ["○◔◑◕●"[round((reward - low) / (high - low) * 4)] for reward in numbers]
    return "".join(marks) + "–" * (len(rewards) - len(numbers))
