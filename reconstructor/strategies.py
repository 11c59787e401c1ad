"""How a forest is cut into segments, behind one small Protocol.

A strategy yields `SegmentPlan`s: chains of calls that extend each other. The calls from `own` on may carry loss in that
segment; the others are context. `reconstruct` checks the invariant: every kept call is owned by exactly one plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rolltap.errors import ConfigError
from rolltap.plugins import lookup
from rolltap.reconstructor.forest import PrefixNode
from rolltap.reconstructor.kinds import Purposes
from rolltap.reconstructor.rules import MaskReason


@dataclass(frozen=True, slots=True, eq=False)
class KeptCalls:
    """The calls that appear in segments: those that the harness went on from, or may still.

    `roots` and `children` are the forest without the calls that came to nothing; `trained` the sampled tokens that
    carry loss in a node's whole subtree.
    """

    nodes: tuple[PrefixNode, ...]
    roots: tuple[PrefixNode, ...]
    children: Mapping[str, tuple[PrefixNode, ...]]
    reasons: Mapping[str, MaskReason]
    trained: Mapping[str, int]
    purposes: Purposes


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """Calls of which each extends the one before it; `path[own:]` carry their loss here."""

    path: tuple[PrefixNode, ...]
    own: int


class Strategy(Protocol):
    """Cuts a forest into segment plans."""

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        """Plans that own every kept call exactly once."""
        ...


class PerCall:
    """Each call is a segment of its own: no merging."""

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for node in kept.nodes:
            yield SegmentPlan((node,), 0)


class Prefix:
    """Linear merging: a call joins the segment whose last call it extends, else it begins a new one.

    Of several calls that extend the same one, the first that leads to trained tokens joins.
    """

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for chain in _chains(kept, lambda node, children: _first(kept, node, children)):
            yield SegmentPlan(tuple(chain), 0)


class Tree:
    """Root-to-leaf segments; a trunk that branches share is trained in the branch with the most trained tokens.

    A segment ends with its last trained call: what hangs on it untrained (a summary, a side call) is a segment of
    its own, without loss, for reading.
    """

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for chain in _chains(kept, lambda node, children: _heaviest(kept, node, children)):
            path = chain[0].path()
            yield SegmentPlan((*path, *chain[1:]), len(path) - 1)


STRATEGIES: Mapping[str, type[Strategy]] = {"per_call": PerCall, "prefix": Prefix, "tree": Tree}

ENTRY_POINTS = "rolltap.strategies"


def strategy_named(name: str) -> Strategy:
    """The strategy `name`, ours or an installed package's; an unknown name lists the known ones."""
    return lookup("strategy", name, STRATEGIES, ENTRY_POINTS, ConfigError)()


class _Follow(Protocol):
    def __call__(self, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None: ...


def _chains(kept: KeptCalls, follow: _Follow) -> Iterable[list[PrefixNode]]:
    """Covers the kept calls by disjoint downward chains; `follow` names the child that goes on with a chain."""
    tops = list(reversed(kept.roots))
    while tops:
        chain = [tops.pop()]
        while children := kept.children[chain[-1].id]:
            heir = follow(chain[-1], children)
            tops += [child for child in reversed(children) if child is not heir]
            if heir is None:
                break
            chain.append(heir)
        yield chain


def _first(kept: KeptCalls, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None:
    """The first child that leads to trained tokens; in an untrained stretch simply the first."""
    if not kept.trained[node.id]:
        return children[0]
    return next((child for child in children if kept.trained[child.id]), None)


def _heaviest(kept: KeptCalls, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None:
    """The child whose subtree trains the most, the node's own agent first; None where only untrained ones hang."""
    trained, agents = kept.trained, kept.purposes.by_call

    def weight(child: PrefixNode) -> tuple[bool, bool, int]:
        return trained[child.id] > 0, agents[child.id].agent == agents[node.id].agent, trained[child.id]

    heir = max(children, key=weight)
    return None if trained[node.id] and not trained[heir.id] else heir
