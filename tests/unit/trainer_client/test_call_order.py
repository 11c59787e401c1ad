"""Calls of a session that two proxies with different clocks made: their ids don't give their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rolltap.trainer_client.data.step import view
from rolltap.types import Break, BreakReason, Segment, Trajectory, call_order

from .acting import rewarded, spoken
from .making import group, record


def named(part: Segment, ids: Sequence[str]) -> Segment:
    turns = zip(part.turns, ids, strict=True)
    return replace(part, turns=tuple(replace(turn, call_id=call_id) for turn, call_id in turns))


def turns(*ids: str, agent: str = "") -> Segment:
    return named(spoken("x", [([5, 6], [8, 9], agent) for _ in ids]), ids)


def broken(call_id: str, parent_id: str | None) -> Break:
    return Break(BreakReason.HISTORY_EDITED, call_id, parent_id, 1)


@pytest.mark.parametrize(
    ("segments", "breaks", "order"),
    [
        ([turns("c9", "c1", "c5")], [], ["c9", "c1", "c5"]),
        ([turns("c9"), turns("c1")], [broken("c1", "c9")], ["c9", "c1"]),
        ([turns("c9"), turns("c1")], [broken("c5", "c9"), broken("c1", "c5")], ["c9", "c5", "c1"]),
        ([turns("c2", "c4"), turns("c1", "c3", agent="sub")], [broken("c1", None)], ["c1", "c2", "c3", "c4"]),
        ([turns("c9", "c1"), turns("c9", "c0")], [], ["c9", "c0", "c1"]),
        ([turns("c9", "c1")], [broken("c9", "c1")], ["c1", "c9"]),
    ],
)
def test_a_call_stands_behind_those_it_goes_on_from(
    segments: Sequence[Segment], breaks: Sequence[Break], order: list[str]
) -> None:
    assert call_order(Trajectory("session", tuple(segments), tuple(breaks), {})) == order


def test_turns_and_their_rewards_stand_in_the_order_of_the_conversation() -> None:
    """The rollout's outcome belongs to the turn that ended it, whatever the clock of the proxy that took it."""
    one = record("a", 0, [turns("c9", "c1", "c5")], 1.0)
    step = view([group("a", [rewarded(one, turn_c9=0.25)])])
    assert [(turn.call_id, turn.index) for turn in step.turns] == [("c9", 0), ("c1", 1), ("c5", 2)]
    assert step.with_outcome().tolist() == [0.25, 0.0, 1.0]
