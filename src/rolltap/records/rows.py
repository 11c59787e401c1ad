"""Which sessions are wanted, and a trajectory's segments as rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from rolltap.reading.index import FIELDS
from rolltap.reading.types import SessionQuery, SessionSummary
from rolltap.reconstructor.exporters.conditions import SEGMENT_FIELDS, Kind
from rolltap.reconstructor.exporters.select import Where, parse_conditions
from rolltap.types import Bool, Float32, Int32, Segment

PAGE = 500
"""How many sessions are read at once."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which sessions of a record, in which order, and which segments of theirs."""

    query: SessionQuery
    segments: Where = field(default_factory=Where)
    limit: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryRow:
    """A segment with where it comes from. Per-token arrays are [L]; `logprobs` is 0 and `versions` -1 off the mask."""

    session_id: str
    rollout_id: str | None
    group_id: str | None
    task_id: str | None
    policy: str
    harness: str
    reward: float | None
    agent: str
    kind: str
    tokens: int
    trained_tokens: int
    calls: int
    oldest_version: int | None
    newest_version: int | None
    token_ids: Int32
    loss_mask: Bool
    logprobs: Float32
    versions: Int32


def selection_of(where: tuple[str, ...]) -> Selection:
    """Conditions on sessions and on segments, each to those who can judge it."""
    kinds: dict[str, Kind] = {**{name: field.kind for name, field in SEGMENT_FIELDS.items()}, **FIELDS}
    conditions = parse_conditions(where, kinds)
    of_segments = tuple(condition for condition in conditions if condition.field in SEGMENT_FIELDS)
    of_sessions = tuple(condition.text for condition in conditions if condition not in of_segments)
    return Selection(SessionQuery(where=of_sessions, limit=PAGE), Where(of_segments))


def trajectory_row(session: SessionSummary, segment: Segment) -> TrajectoryRow:
    versions = segment.versions[segment.loss_mask]
    return TrajectoryRow(
        session_id=session.id,
        rollout_id=session.rollout_id,
        group_id=session.group_id,
        task_id=session.task_id,
        policy=session.policy,
        harness=session.harness,
        reward=session.reward,
        agent=segment.agent,
        kind=segment.kind.value,
        tokens=len(segment),
        trained_tokens=int(segment.loss_mask.sum()),
        calls=len(segment.turns),
        oldest_version=int(versions.min()) if len(versions) else None,
        newest_version=int(versions.max()) if len(versions) else None,
        token_ids=segment.token_ids,
        loss_mask=segment.loss_mask,
        logprobs=segment.logprobs,
        versions=segment.versions,
    )
