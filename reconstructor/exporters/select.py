"""`--where`: which rollouts and segments a dataset holds.

    reward>=0.5 and harness in (codex, pi) and not task~"swe *" and (date>=2026-03-01 or tag.team=a) and length<=8192

Each condition is a field, an operator and a value, in quotes if it has spaces. Texts and lists have `=`, `!=` and `~`
(a shell pattern); numbers and dates have `= != < <= > >=`. A field without a value (no reward yet, no task) satisfies
only `!=`. Conditions on segment fields drop segments; the others drop whole rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import ExportItem, trained_spans
from rolltap.reconstructor.exporters.conditions import (
    ITEM_FIELDS,
    SEGMENT_FIELDS,
    AllOf,
    Expression,
    FilterCondition,
    Kind,
)
from rolltap.reconstructor.exporters.language import parse
from rolltap.types import Segment, Trajectory

FIELD_KINDS: Mapping[str, Kind] = {name: field.kind for name, field in {**ITEM_FIELDS, **SEGMENT_FIELDS}.items()}


@dataclass(frozen=True, slots=True)
class Where:
    """A selection: all of its parts must be true."""

    parts: Sequence[Expression] = ()

    def __str__(self) -> str:
        return " and ".join(part.text for part in self.parts)

    def holds(self, segment: Segment) -> bool:
        """True if the segment matches. All conditions must be on segment fields."""
        return all(part.holds(None, segment) for part in self.parts)

    def refuses(self, item: ExportItem) -> bool:
        """True if a condition that needs no calls doesn't hold. The item's calls need not be read yet."""
        return not all(part.holds(item, None) for part in self.parts if not part.of_calls)

    def keep(self, item: ExportItem) -> ExportItem | None:
        """The item with its matching segments, or None if the item or all of its segments don't match."""
        of_segments = [part for part in self.parts if part.of_segments]
        if not all(part.holds(item, None) for part in self.parts if not part.of_segments):
            return None
        if not of_segments:
            return item
        kept = tuple(s for s in item.trajectory.segments if all(part.holds(item, s) for part in of_segments))
        return replace(item, trajectory=_with_segments(item.trajectory, kept)) if kept else None


def _with_segments(trajectory: Trajectory, kept: tuple[Segment, ...]) -> Trajectory:
    """The trajectory with only the kept segments, and with its segment counts recomputed."""
    rows = [segment for segment in kept if segment.loss_mask.any()]
    counts = {
        **trajectory.counts,
        "segments": len(kept),
        "rows": len(rows),
        "row_tokens": sum(map(len, rows)),
        "trained_tokens": sum(int(segment.loss_mask.sum()) for segment in rows),
        "trained_calls": sum(len(trained_spans(segment)) for segment in rows),
    }
    return replace(trajectory, segments=kept, counts=counts)


def parse_where(texts: Sequence[str]) -> Where:
    """Parses the values of one or several `--where`. Raises `DatasetError` if one can't be parsed."""
    return Where(tuple(part for text in texts for part in _parts(text, FIELD_KINDS)))


def parse_conditions(texts: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[FilterCondition, ...]:
    """Parses conditions over fields of these kinds. Raises `DatasetError` if anything but `and` joins them."""
    parts = [part for text in texts for part in _parts(text, kinds)]
    for part in parts:
        if not isinstance(part, FilterCondition):
            raise DatasetError(f"where: {part.text}: here conditions are joined by and only")
    return tuple(part for part in parts if isinstance(part, FilterCondition))


def _parts(text: str, kinds: Mapping[str, Kind]) -> tuple[Expression, ...]:
    """The parts of a text that `and` joins at its top level."""
    if not text.strip():
        return ()
    expression = parse(text, kinds)
    return expression.parts if isinstance(expression, AllOf) else (expression,)
