"""The order of a trajectory's calls: what a call is known to come after, and the clock only where nothing is known.

Ids of calls sort by the clock of the proxy that made them. Two proxies of one session may have clocks that differ, so a
reply's id may be less than that of the call it goes on from.
"""

from __future__ import annotations

import heapq
from graphlib import CycleError, TopologicalSorter

from rolltap.types import Trajectory


def call_order(trajectory: Trajectory) -> list[str]:
    """The ids of all calls that its segments and breaks name, each once.

    A call stands behind those whose tokens its prompt holds and behind the parent that its break names, else by id: of
    agents that work side by side, nothing but the clock says which call came first. Where what is known contradicts
    itself, the calls of the segments are ordered by id.
    """
    known: TopologicalSorter[str] = TopologicalSorter()
    called = {span.call_id for segment in trajectory.segments for span in segment.turns}
    for segment in trajectory.segments:
        before: list[str] = []
        for span in segment.turns:
            known.add(span.call_id, *before)
            before = [span.call_id]
    for broken in trajectory.breaks:
        known.add(broken.call_id, *([] if broken.parent_id is None else [broken.parent_id]))
    try:
        known.prepare()
    except CycleError:  # a file of somebody else's may name parents that come later
        return sorted(called)
    ready = list(known.get_ready())
    heapq.heapify(ready)
    ordered: list[str] = []
    while ready:
        ordered.append(heapq.heappop(ready))
        known.done(ordered[-1])
        for call_id in known.get_ready():
            heapq.heappush(ready, call_id)
    return ordered
