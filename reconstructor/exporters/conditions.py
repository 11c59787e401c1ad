"""The parts of a selection: fields, conditions on them, and combinations of conditions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np

from rolltap.reconstructor.exporters.base import ExportItem, trained_spans
from rolltap.types import CallKind, Segment
from rolltap.wording import utc_text

Kind = Literal["text", "number", "date", "tags", "list"]

COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
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


def _last_finish(item: ExportItem) -> str | None:
    """How the agent's last reply ended."""
    agents = [call for call in item.calls.values() if item.kinds.get(call.id) is CallKind.MAIN]
    return agents[-1].finish.value if agents else None


def _tampering(item: ExportItem) -> int:
    return sum(item.rollout.tampering.values()) if item.rollout else 0


def _unprotected(item: ExportItem) -> int:
    return int(item.rollout is not None and bool(item.rollout.unprotected))


def _tools(item: ExportItem) -> list[str]:
    return sorted({tool["function"]["name"] for text in item.texts.values() for tool in text.tools})


def _words(item: ExportItem) -> list[str]:
    return [str(message.get("content") or "") for text in item.texts.values() for message in text.conversation]


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
    "tampering": Field("number", _tampering, "attempts of its agent to tamper, of any kind"),
    "tampered": Field("list", lambda item: list(item.rollout.tampering) if item.rollout else [], "their kinds"),
    "unprotected": Field("number", _unprotected, "1 if code of its agent could have written its reward, else 0"),
    "date": Field("date", lambda item: item.session.created_at, "when the session was opened (UTC)"),
    "calls": Field("number", lambda item: len(item.calls), "calls of the session"),
    "finish": Field("text", _last_finish, "how the agent's last reply ended"),
    "dialect": Field("list", lambda item: [text.dialect for text in item.texts.values()], "protocols of its calls"),
    "model": Field("list", lambda item: [str(t.sampling.get("model")) for t in item.texts.values()], "engine's models"),
    "break": Field("list", lambda item: [b.reason.value for b in item.trajectory.breaks], "reasons of its breaks"),
    "finding": Field("list", lambda item: [finding.name for finding in item.trajectory.findings], "its findings"),
    "tools": Field("list", _tools, "names of the tools that were offered"),
    "text": Field("list", _words, "what was said in any message"),
    "tag": Field("tags", lambda item: item, "a tag of the group or task; tag.NAME is a session's tag"),
}
CALL_FIELDS = ("calls", "finish", "dialect", "model", "break", "finding", "tools", "text")
"""Those of `ITEM_FIELDS` that need a session's calls. The others are known before these are read."""

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
    """One comparison of a field with a value. `text` is as the user wrote it."""

    text: str
    field: str
    op: str
    value: Any

    @property
    def of_segments(self) -> bool:
        return self.field in SEGMENT_FIELDS

    @property
    def of_calls(self) -> bool:
        """True if it needs the session's calls, or segments made of them."""
        return self.of_segments or self.field in CALL_FIELDS

    def holds(self, item: ExportItem | None, segment: Segment | None) -> bool:
        """True if the item matches, or the segment if the field is one of `SEGMENT_FIELDS`."""
        name, _, key = self.field.partition(".")
        if name == "tag":
            assert item is not None
            return self._tag_matches(item, key)
        field = ITEM_FIELDS.get(name) or SEGMENT_FIELDS[name]
        value = field.read(segment if self.of_segments else item)
        if field.kind == "list":
            matches = any(fnmatchcase(each, self.value) if self.op == "~" else each == self.value for each in value)
            return matches != (self.op == "!=")
        if value is None:
            return self.op == "!="
        if self.op == "~":
            return fnmatchcase(value, self.value)
        if isinstance(self.value, str) and field.kind == "date":
            value = utc_text(value, "%Y-%m-%d")
        return COMPARE[self.op](value, self.value)

    def _tag_matches(self, item: ExportItem, key: str) -> bool:
        values = [item.session.tags[key]] if key in item.session.tags else []
        if not key:
            values = [*item.tags, *(item.task.tags if item.task else ())]
        matches = any(fnmatchcase(value, self.value) if self.op == "~" else value == self.value for value in values)
        return matches != (self.op == "!=")


@dataclass(frozen=True, slots=True)
class AllOf:
    """True if all of its parts are true."""

    parts: tuple[Expression, ...]

    @property
    def text(self) -> str:
        return f"({' and '.join(part.text for part in self.parts)})"

    @property
    def of_segments(self) -> bool:
        return any(part.of_segments for part in self.parts)

    @property
    def of_calls(self) -> bool:
        return any(part.of_calls for part in self.parts)

    def holds(self, item: ExportItem | None, segment: Segment | None) -> bool:
        return all(part.holds(item, segment) for part in self.parts)


@dataclass(frozen=True, slots=True)
class AnyOf:
    """True if at least one of its parts is true."""

    parts: tuple[Expression, ...]

    @property
    def text(self) -> str:
        return f"({' or '.join(part.text for part in self.parts)})"

    @property
    def of_segments(self) -> bool:
        return any(part.of_segments for part in self.parts)

    @property
    def of_calls(self) -> bool:
        return any(part.of_calls for part in self.parts)

    def holds(self, item: ExportItem | None, segment: Segment | None) -> bool:
        return any(part.holds(item, segment) for part in self.parts)


@dataclass(frozen=True, slots=True)
class NotOf:
    """True if its part is false."""

    part: Expression

    @property
    def text(self) -> str:
        return f"not {self.part.text}"

    @property
    def of_segments(self) -> bool:
        return self.part.of_segments

    @property
    def of_calls(self) -> bool:
        return self.part.of_calls

    def holds(self, item: ExportItem | None, segment: Segment | None) -> bool:
        return not self.part.holds(item, segment)


Expression = FilterCondition | AllOf | AnyOf | NotOf
