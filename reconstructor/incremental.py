"""A running session, reconstructed as it grows.

Adding a call costs that call: its comparison with its parent and one pass over its new tokens. A trajectory costs a
judgement of each call (no tokens touched) and the arrays of the segments that changed; the others are the same
objects as in the trajectory before.
"""

from __future__ import annotations

from collections.abc import Iterable

from rolltap.reconstructor.forest import TokenForest
from rolltap.reconstructor.reconstruct import SegmentKey, assemble
from rolltap.reconstructor.rules import Rules
from rolltap.reconstructor.strategies import Strategy, strategy_named
from rolltap.types import Call, Segment, Trajectory


class RunningSession:
    """Takes a session's calls as they end, in any order; equal to `reconstruct` of all of them at every moment.

    A call is a fact, so it is added when it has ended. It may be added again when its delivery has become known.
    """

    def __init__(self, *, strategy: str | Strategy = "tree", rules: Rules | None = None) -> None:
        self._forest = TokenForest()
        self._strategy = strategy_named(strategy) if isinstance(strategy, str) else strategy
        self._rules = rules or Rules()
        self._built: dict[SegmentKey, Segment] = {}

    def add(self, calls: Iterable[Call]) -> None:
        """Takes in calls; `RecordCorrupt` if one contradicts what is known."""
        for call in calls:
            self._forest.add(call)

    def trajectory(self) -> Trajectory:
        """The trajectory of the calls so far."""
        return assemble(self._forest, self._strategy, self._rules, self._built)
