"""`--where`: which rollouts and segments a dataset holds.

    reward>=0.5 and harness in (codex, pi) and not task~"swe *" and (date>=2026-03-01 or tag.team=a) and length<=8192

Each condition is a field, an operator and a value, in quotes if it holds spaces. Texts and lists know `=`, `!=` and `~`
(a shell pattern), numbers and dates all of `= != < <= > >=`. A field without a value (no reward yet, no task) satisfies
only `!=`. What names fields of segments drops segments; the rest drops whole rollouts.
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
    """All of its parts must hold."""

    parts: Sequence[Expression] = ()

    def __str__(self) -> str:
        return " and ".join(part.text for part in self.parts)

    def holds(self, segment: Segment) -> bool:
        """Whether a segment satisfies these conditions, which are all of segments."""
        return all(part.holds(None, segment) for part in self.parts)

    def keep(self, item: ExportItem) -> ExportItem | None:
        """The item with the segments that are wanted, or None if it is not wanted or none of its segments is."""
        of_segments = [part for part in self.parts if part.of_segments]
        if not all(part.holds(item, None) for part in self.parts if not part.of_segments):
            return None
        if not of_segments:
            return item
        kept = tuple(s for s in item.trajectory.segments if all(part.holds(item, s) for part in of_segments))
        return replace(item, trajectory=_with_segments(item.trajectory, kept)) if kept else None


def _with_segments(trajectory: Trajectory, kept: tuple[Segment, ...]) -> Trajectory:
    """The trajectory with some of its segments; what is counted on segments is counted again."""
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
    """The expressions of `--where`, given once or several times; `DatasetError` names what can't be read."""
    return Where(tuple(part for text in texts for part in _parts(text, FIELD_KINDS)))


def parse_conditions(texts: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[FilterCondition, ...]:
    """The conditions of texts in this language, over fields of these kinds, where only `and` may join them."""
    parts = [part for text in texts for part in _parts(text, kinds)]
    for part in parts:
        if not isinstance(part, FilterCondition):
            raise DatasetError(f"where: {part.text}: here conditions are joined by and only")
    return tuple(part for part in parts if isinstance(part, FilterCondition))


def _parts(text: str, kinds: Mapping[str, Kind]) -> tuple[Expression, ...]:
    """What must all hold."""
    if not text.strip():
        return ()
    whole = parse(text, kinds)
    return whole.parts if isinstance(whole, AllOf) else (whole,)
