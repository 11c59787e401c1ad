"""A recorded session whose harness runs again: which of its replies answers a request (`rolltap.proxy.call.replay`).

Requests are compared as continuation compares them: messages, tools, system text, effort; ids, key order and declared
volatile text do not count. A repeated request gets the replies in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rolltap.calllog.facts import CallRow
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.forest import Forest


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The calls of a recorded session whose replies its harness got, in order. `goes_on`: the engine answers after
    the last one."""

    calls: Sequence[tuple[CallNode, CallRow]]
    goes_on: bool

    @classmethod
    def of(cls, rows: Sequence[CallRow], forest: Forest, calls: int | None) -> Recording:
        """The recording of a session's `rows`, up to the first `calls` (None: all). `forest`: one with the calls of its
        origin only, if it is a fork."""
        forest.load(rows)
        pairs = [
            (node, row)
            for row in rows
            if (node := forest.nodes.get(row.intent.id)) is not None and node.continuable and row.delivered is not False
        ]
        return cls(pairs[:calls], goes_on=calls is not None)

    def find(self, request_hash: bytes, choices: int, forest: Forest) -> Sequence[CallRow]:
        """The recorded calls that answer a request of the session with `forest`, one for each of its choices. Empty if
        all were replayed, or if the request is not on record."""
        rows = [row for node, row in self.calls if node.request_hash() == request_hash]
        asked = sum(node.request_hash() == request_hash for node in forest.own)
        return [rows[min(asked + index, len(rows) - 1)] for index in range(choices)] if rows else []

    def next(self, forest: Forest) -> CallRow | None:
        """The first recorded call whose request the session with `forest` has not made; None if it made all."""
        asked = Counter(node.request_hash() for node in forest.own)
        for node, row in self.calls:
            if asked[node.request_hash()] == 0:
                return row
            asked[node.request_hash()] -= 1
        return None
