"""From a session's recorded calls to its trajectory: a pure function, and the place where token fidelity is made.

Invariants, each a property test in `tests/unit/reconstructor`:

* Every token with loss was sampled by the engine, stands behind exactly the prompt that the engine saw, and carries
  the log-probability and the weight version that it was sampled with.
* Each trained call's sampled tokens carry loss in exactly one segment and are context everywhere else.
* A segment up to the end of any of its turns is exactly that call's prompt and output.
* The result depends on the set of calls only: not on their order, nor on how often one is recorded.

Nothing is healed: what is not proven by equal tokens begins a new segment, with a `Break` that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rolltap.errors import ConfigError
from rolltap.reconstructor.breaks import breaks_of
from rolltap.reconstructor.forest import Forest, Node
from rolltap.reconstructor.rules import Rules, Ruling
from rolltap.reconstructor.segments import TurnPair, build_segment, turn_pair
from rolltap.reconstructor.standing import judge
from rolltap.reconstructor.strategies import Run, Standing, Strategy, strategy_named
from rolltap.types import Break, BreakReason, Call, Segment, Trajectory


def reconstruct(calls: Iterable[Call], *, strategy: str | Strategy = "tree", rules: Rules | None = None) -> Trajectory:
    """The trajectory of one session's calls.

    `strategy` is a name of `STRATEGIES` (or of an installed entry point), or a `Strategy`; `rules` default to
    `Rules()`. Raises `RecordCorrupt` where two records of a call differ or calls of several sessions are mixed,
    `AlignmentError` where arrays disagree, `ConfigError` for an unknown strategy.
    """
    forest = Forest()
    for call in sorted(calls, key=lambda call: call.id):
        forest.add(call)
    chosen = strategy_named(strategy) if isinstance(strategy, str) else strategy
    return assemble(forest, chosen, rules or Rules(), {})


SegmentKey = tuple[tuple[str, ...], int, tuple[Ruling, ...], int]
"""What a segment is made of: the ids of its calls, the first that it owns, their rulings, its first turn's index."""


def assemble(forest: Forest, strategy: Strategy, rules: Rules, built: dict[SegmentKey, Segment]) -> Trajectory:
    """The trajectory of a forest. Segments in `built` are used again; it is left holding the current ones."""
    standing = judge(forest, rules)
    breaks = breaks_of(forest)
    runs = sorted(strategy.runs(standing), key=lambda run: run.path[run.own].id)
    _check(runs, standing)
    indices = _turn_indices(forest, breaks)
    turns = {node.id: turn_pair(node, indices[node.id], standing.rulings[node.id]) for node in standing.nodes}
    current: dict[SegmentKey, Segment] = {}
    for run in runs:
        key = _key(run, standing, turns)
        current[key] = built.get(key) or build_segment(run, turns)
    built.clear()
    built.update(current)
    segments = tuple(current.values())
    return Trajectory(
        session_id=forest.nodes[0].call.session_id if forest.nodes else "",
        segments=segments,
        breaks=tuple(breaks.values()),
        counts=_counts(forest, standing, breaks, segments),
    )


def _key(run: Run, standing: Standing, turns: Mapping[str, TurnPair]) -> SegmentKey:
    rulings = tuple(standing.rulings[node.id] for node in run.path)
    return tuple(node.id for node in run.path), run.own, rulings, turns[run.path[0].id].context.index


def _check(runs: Sequence[Run], standing: Standing) -> None:
    """Holds a strategy to its contract."""
    owners = Counter(node.id for run in runs for node in run.path[run.own :])
    if owners.keys() != {node.id for node in standing.nodes} or any(count > 1 for count in owners.values()):
        wrong = sorted(node.id for node in standing.nodes if owners[node.id] != 1)
        raise ConfigError(f"a strategy must own every standing call once; not so for {', '.join(wrong[:5])}")
    for run in runs:
        for earlier, later in zip(run.path, run.path[1:], strict=False):
            if later.parent is not earlier:
                raise ConfigError(f"a strategy put call {later.id} behind {earlier.id}, which it does not extend")


def _turn_indices(forest: Forest, breaks: Mapping[str, Break]) -> dict[str, int]:
    """Each call's position in its lineage, which goes on over a break unless that begins a new conversation."""
    indices: dict[str, int] = {}
    for node in forest:
        chain: dict[str, None] = {}
        step: Node | None = node
        while step is not None and step.id not in indices and step.id not in chain:
            chain[step.id] = None
            step = step.parent or _before_break(forest, step, breaks.get(step.id))
        first = indices.get(step.id, -1) + 1 if step is not None else 0
        indices.update((call_id, first + depth) for depth, call_id in enumerate(reversed(chain)))
    return indices


def _before_break(forest: Forest, node: Node, before: Break | None) -> Node | None:
    if before is None or before.reason is BreakReason.NEW_CONVERSATION:
        return None
    return forest.get(before.parent_id)


def _counts(
    forest: Forest, standing: Standing, breaks: Mapping[str, Break], segments: Sequence[Segment]
) -> dict[str, int]:
    """What the report shows; `trained_tokens` is counted on the masks, `trainable_tokens` on the calls."""
    counts = Counter(
        {
            "calls": len(forest),
            "prompt_tokens": sum(len(node.call.prompt_ids) for node in forest),
            "sampled_tokens": sum(len(node.call.output_ids) for node in forest),
            "trainable_tokens": sum(standing.trained[root.id] for root in standing.roots),
            "trained_tokens": sum(int(segment.loss_mask.sum()) for segment in segments),
            "trained_calls": sum(ruling is Ruling.TRAINED for ruling in standing.rulings.values()),
            "call_row_tokens": sum(
                node.length for node in standing.nodes if standing.rulings[node.id] is Ruling.TRAINED
            ),
            "merged_calls": sum(node.parent is not None for node in forest),
            "segments": len(segments),
            "rows": sum(bool(segment.loss_mask.any()) for segment in segments),
            "row_tokens": sum(len(segment) for segment in segments if segment.loss_mask.any()),
            "breaks": len(breaks),
        }
    )
    for node in forest:
        ruling = standing.rulings[node.id]
        if ruling is not Ruling.TRAINED:
            counts[f"masked_calls.{ruling}"] += 1
            counts[f"masked_tokens.{ruling}"] += len(node.call.output_ids)
    counts.update(f"breaks.{found.reason}" for found in breaks.values())
    return {name: counts[name] for name in sorted(counts)}
