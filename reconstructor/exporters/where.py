"""`--where`: which rollouts and segments a dataset holds.

    reward>=0.5 and harness in (codex, pi) and not task~"swe *" and (date>=2026-03-01 or tag.team=a) and length<=8192

Each condition is a field, an operator and a value, in quotes if it has spaces. Texts and lists have `=`, `!=` and `~`
(a shell pattern); numbers and dates have `= != < <= > >=`. A field without a value (no reward yet, no task) satisfies
only `!=`. Conditions on segment fields drop segments; the others drop whole rollouts.

The file reads upwards: fields, conditions on them, their combinations, the grammar (lark), the selection.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import numpy as np
from lark import Lark, Token, Transformer, UnexpectedInput, UnexpectedToken
from lark.exceptions import VisitError

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import ExportItem, trained_spans
from rolltap.types import CallKind, Segment, Trajectory
from rolltap.wording import did_you_mean, utc_text

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


GRAMMAR = r"""
    ?start: either
    ?either: both (_OR both)*
    ?both: negated (_AND negated)*
    ?negated: _NOT negated -> no
        | "(" either ")"
        | FIELD OP VALUE -> condition
        | FIELD _IN "(" VALUE ("," VALUE)* ")" -> within
        | FIELD _NOT _IN "(" VALUE ("," VALUE)* ")" -> without

    _OR.2: /or(?=[\s(])/
    _AND.2: /and(?=[\s(])/
    _NOT.2: /not(?=[\s(])/
    _IN.2: /in(?=[\s(])/
    OP: "!=" | ">=" | "<=" | "=" | "<" | ">" | "~"
    FIELD: /[A-Za-z_][\w.\-]*/
    VALUE: /"[^"]*"/ | /'[^']*'/ | /[^\s()"',]+/
    %ignore /\s+/
"""
EXPECTED = "FIELD OP VALUE, as in reward>=0.5 or task in (a, 'b c'), joined by and, or, not and brackets"


def parse(text: str, kinds: Mapping[str, Kind]) -> Expression:
    """Parses a text over fields of these kinds. Raises `DatasetError`, with the place and the reason."""
    try:
        return _Builder(text, kinds).transform(_parser().parse(text))
    except UnexpectedInput as error:
        ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
        at = len(text) if ended or error.pos_in_stream is None else error.pos_in_stream
        raise DatasetError(
            f"where: can't read {text!r} from character {at + 1} on ({text[at : at + 20]!r}); expected {EXPECTED}; "
            f"fields: {', '.join(sorted(kinds))}, tag.NAME"
        ) from None
    except VisitError as error:
        raise error.orig_exc from None


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr")


class _Builder(Transformer[Token, Expression]):
    """Builds the expression from the parse tree."""

    def __init__(self, text: str, kinds: Mapping[str, Kind]) -> None:
        super().__init__()
        self._text = text
        self._kinds = kinds

    def either(self, parts: list[Expression]) -> Expression:
        return AnyOf(tuple(parts))

    def both(self, parts: list[Expression]) -> Expression:
        return AllOf(tuple(parts))

    def no(self, parts: list[Expression]) -> Expression:
        return NotOf(parts[0])

    def condition(self, tokens: list[Token]) -> Expression:
        field, op, value = tokens
        return self._comparison(field, str(op), value)

    def within(self, tokens: list[Token]) -> Expression:
        return AnyOf(tuple(self._comparison(tokens[0], "=", value) for value in tokens[1:]))

    def without(self, tokens: list[Token]) -> Expression:
        return NotOf(self.within(tokens))

    def _comparison(self, field: Token, op: str, value: Token) -> FilterCondition:
        name = str(field)
        kind = self._kinds.get("tag" if name.startswith("tag.") else name)
        if kind is None:
            known = ", ".join(sorted(self._kinds))
            raise DatasetError(
                f"where: no field {name!r} (character {(field.start_pos or 0) + 1}); known: {known}, tag.NAME"
                f"{did_you_mean(name, self._kinds)}"
            )
        operators = ("=", "!=", "~") if kind in ("text", "tags", "list") else tuple(COMPARE)
        if op not in operators:
            raise DatasetError(f"where: {name} knows {' '.join(operators)}, not {op}")
        plain = str(value)
        plain = plain[1:-1] if plain[0] in "\"'" else plain
        return FilterCondition(f"{name}{op}{value}", name, op, _value(name, kind, plain))


def _value(name: str, kind: Kind, text: str) -> Any:
    """A condition's value by its kind. A date without a time stays a text, which is compared with the day."""
    try:
        if kind == "number":
            return float(text)
        if kind == "date":
            moment = datetime.fromisoformat(text)
            if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
                return text
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        expected = "a number" if kind == "number" else "an ISO date, as in 2026-03-01"
        raise DatasetError(f"where: {name} needs {expected}, not {text!r}") from None
    return text


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
