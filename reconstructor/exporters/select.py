"""`--where`: which rollouts and segments a dataset holds.

    reward>=0.5 and harness=codex and task~swe-* and date>=2026-03-01 and length<=8192 and tag.team=a

Conditions are joined by `and`; each is a field, an operator and a value. Texts know `=`, `!=` and `~` (a shell
pattern), numbers and dates all of `= != < <= > >=`. A field without a value (no reward yet, no task) satisfies only
`!=`. Fields of segments drop segments; the others drop whole rollouts.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import ExportItem, trained_spans
from rolltap.types import Segment, Trajectory

Kind = Literal["text", "number", "date", "tags"]

_CONDITION = re.compile(r"^\s*(?P<field>[\w.\-]+?)\s*(?P<op>!=|>=|<=|=|<|>|~)\s*(?P<value>.*?)\s*$", re.DOTALL)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Field:
    kind: Kind
    read: Callable[[Any], Any]
    doc: str


def _versions(segment: Segment) -> np.ndarray:
    return segment.versions[segment.loss_mask]


ITEM_FIELDS: Mapping[str, Field] = {
    "task": Field("text", lambda item: item.task.id if item.task else None, "task id"),
    "group": Field("text", lambda item: item.group_id, "group id"),
    "rollout": Field("text", lambda item: item.rollout.id if item.rollout else None, "rollout id"),
    "session": Field("text", lambda item: item.session.id, "session id"),
    "policy": Field("text", lambda item: item.session.policy, "policy of the session"),
    "harness": Field("text", lambda item: item.harness or None, "harness that ran"),
    "status": Field("text", lambda item: item.rollout.status.value if item.rollout else None, "how the rollout ended"),
    "scoring": Field("text", lambda item: item.rollout.scoring.value if item.rollout else None, "what its reward is"),
    "reward": Field("number", lambda item: item.reward, "sum of the rollout-scope rewards"),
    "date": Field("date", lambda item: item.session.created_at, "when the session was opened (UTC)"),
    "tag": Field("tags", lambda item: item, "a tag of the group or task; tag.NAME is a session's tag"),
}
SEGMENT_FIELDS: Mapping[str, Field] = {
    "agent": Field("text", lambda segment: segment.agent, "agent within the session; the main one is empty"),
    "kind": Field("text", lambda segment: segment.kind.value, "what the segment's calls are for"),
    "length": Field("number", len, "tokens"),
    "trained": Field("number", lambda segment: int(segment.loss_mask.sum()), "tokens with loss"),
    "turns": Field("number", lambda segment: len(trained_spans(segment)), "calls with loss"),
    "version": Field("number", lambda s: int(_versions(s).max(initial=-1)), "newest weight version with loss"),
    "oldest": Field("number", lambda s: int(_versions(s).min()) if s.loss_mask.any() else None, "oldest one"),
}


@dataclass(frozen=True, slots=True)
class FilterCondition:
    """One comparison. `text` is as it was written."""

    text: str
    field: str
    op: str
    value: Any

    def holds(self, subject: ExportItem | Segment) -> bool:
        name, _, key = self.field.partition(".")
        if name == "tag":
            return self._tagged(subject, key)  # type: ignore[arg-type]
        field = ITEM_FIELDS.get(name) or SEGMENT_FIELDS[name]
        found = field.read(subject)
        if found is None:
            return self.op == "!="
        if self.op == "~":
            return fnmatchcase(found, self.value)
        if isinstance(self.value, str) and field.kind == "date":
            found = datetime.fromtimestamp(found, UTC).strftime("%Y-%m-%d")
        return _COMPARE[self.op](found, self.value)

    def _tagged(self, item: ExportItem, key: str) -> bool:
        values = [item.session.tags[key]] if key in item.session.tags else []
        if not key:
            values = [*item.tags, *(item.task.tags if item.task else ())]
        found = any(fnmatchcase(value, self.value) if self.op == "~" else value == self.value for value in values)
        return found != (self.op == "!=")


@dataclass(frozen=True, slots=True)
class Where:
    """All of its conditions must hold."""

    conditions: Sequence[FilterCondition] = ()

    def __str__(self) -> str:
        return " and ".join(condition.text for condition in self.conditions)

    def holds(self, segment: Segment) -> bool:
        """Whether a segment satisfies these conditions, which are all of segments."""
        return all(condition.holds(segment) for condition in self.conditions)

    def keep(self, item: ExportItem) -> ExportItem | None:
        """The item with the segments that are wanted, or None if it is not wanted or none of its segments is."""
        of_segments = [condition for condition in self.conditions if condition.field in SEGMENT_FIELDS]
        if not all(condition.holds(item) for condition in self.conditions if condition not in of_segments):
            return None
        if not of_segments:
            return item
        kept = tuple(s for s in item.trajectory.segments if all(condition.holds(s) for condition in of_segments))
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
    """The conditions of `--where`, given once or several times; `DatasetError` names what can't be read."""
    return Where(
        parse_conditions(texts, {name: field.kind for name, field in {**ITEM_FIELDS, **SEGMENT_FIELDS}.items()})
    )


def parse_conditions(texts: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[FilterCondition, ...]:
    """The conditions of texts in this language, over fields of these kinds."""
    parts = [part.strip() for text in texts for part in re.split(r"\s+and\s+", text)]
    return tuple(_condition(part, kinds) for part in parts if part)


def _condition(text: str, kinds: Mapping[str, Kind]) -> FilterCondition:
    match = _CONDITION.match(text)
    if match is None:
        raise DatasetError(f"--where: can't read {text!r}; want FIELD OP VALUE, as in reward>=0.5")
    name, op, value = match["field"], match["op"], match["value"].strip("'\"")
    kind = kinds.get(name.partition(".")[0] if name.startswith("tag.") else name)
    if kind is None:
        raise DatasetError(f"--where: no field {name!r}; known: {', '.join(sorted(kinds))}, tag.NAME")
    wanted = ("=", "!=", "~") if kind in ("text", "tags") else tuple(_COMPARE)
    if op not in wanted:
        raise DatasetError(f"--where: {name} knows {' '.join(wanted)}, not {op}")
    return FilterCondition(text, name, op, _value(name, kind, value))


def _value(name: str, kind: Kind, text: str) -> Any:
    """A date without a time stays a text, which is compared with the day."""
    try:
        if kind == "number":
            return float(text)
        if kind == "date":
            moment = datetime.fromisoformat(text)
            if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
                return text
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        want = "a number" if kind == "number" else "an ISO date, as in 2026-03-01"
        raise DatasetError(f"--where: {name} wants {want}, not {text!r}") from None
    return text
