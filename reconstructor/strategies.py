"""Strategies: ways to cut a forest into segments, behind one small Protocol.

A strategy yields `SegmentPlan`s: chains of calls that extend each other. The calls from `own` on may carry loss in the
segment; the others are context. `reconstruct` checks that exactly one plan owns each kept call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rolltap.errors import ConfigError
from rolltap.extras import lookup
from rolltap.reconstructor.forest import PrefixNode
from rolltap.reconstructor.kinds import Purposes
from rolltap.reconstructor.rules import MaskReason


@dataclass(frozen=True, slots=True, eq=False)
class KeptCalls:
    """The calls that appear in segments: those that the harness continued, or may still continue.

    `roots` and `children` are the forest without calls that have no usable reply. `trained` is the number of sampled
    tokens with loss in a node's whole subtree.
    """

    nodes: tuple[PrefixNode, ...]
    roots: tuple[PrefixNode, ...]
    children: Mapping[str, tuple[PrefixNode, ...]]
    reasons: Mapping[str, MaskReason]
    trained: Mapping[str, int]
    purposes: Purposes


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """A chain of calls, each extending the previous one. The calls `path[own:]` carry their loss here."""

    path: tuple[PrefixNode, ...]
    own: int


class Strategy(Protocol):
    """Cuts a forest into segment plans."""

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        """Plans that together own every kept call exactly once."""
        ...


class PerCall:
    """One segment per call, without merging."""

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for node in kept.nodes:
            yield SegmentPlan((node,), 0)


class Prefix:
    """Linear merging: a call joins the segment whose last call it extends, or else begins a new one.

    If several calls extend the same one, the first that leads to trained tokens joins.
    """

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for chain in _chains(kept, lambda node, children: _first(kept, node, children)):
            yield SegmentPlan(tuple(chain), 0)


class Tree:
    """Root-to-leaf segments. A trunk shared by branches is trained in the branch with the most trained tokens.

    A segment ends with its last trained call. Untrained calls after it (a summary, a side call) form their own segment
    without loss, for reading.
    """

    def plans(self, kept: KeptCalls) -> Iterable[SegmentPlan]:
        for chain in _chains(kept, lambda node, children: _heaviest(kept, node, children)):
            path = chain[0].path()
            yield SegmentPlan((*path, *chain[1:]), len(path) - 1)


STRATEGIES: Mapping[str, type[Strategy]] = {"per_call": PerCall, "prefix": Prefix, "tree": Tree}

ENTRY_POINTS = "rolltap.strategies"


def strategy_named(name: str) -> Strategy:
    """The strategy with this name, built in or from an installed package. An error lists the known names."""
    return lookup("strategy", name, STRATEGIES, ENTRY_POINTS, ConfigError)()


class _Follow(Protocol):
    def __call__(self, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None: ...


def _chains(kept: KeptCalls, follow: _Follow) -> Iterable[list[PrefixNode]]:
    """Covers the kept calls by disjoint downward chains. `follow` chooses the child that continues a chain."""
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
    """The first child that leads to trained tokens; if none does, the first child."""
    if not kept.trained[node.id]:
        return children[0]
    return next((child for child in children if kept.trained[child.id]), None)


def _heaviest(kept: KeptCalls, node: PrefixNode, children: tuple[PrefixNode, ...]) -> PrefixNode | None:
    """The child whose subtree has the most trained tokens, of the same agent first; None if no subtree has any."""
    trained, agents = kept.trained, kept.purposes.by_call

    def weight(child: PrefixNode) -> tuple[bool, bool, int]:
        return trained[child.id] > 0, agents[child.id].agent == agents[node.id].agent, trained[child.id]

    heir = max(children, key=weight)
    return None if trained[node.id] and not trained[heir.id] else heir
