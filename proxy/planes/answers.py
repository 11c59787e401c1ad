"""Response types of the trainer and admin planes that are not types of the glossary, contract or ledger.

OpenAPI has them as the routes' response models. Times are in seconds; those that end in `_at` since the epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from rolltap import wire
from rolltap.contract.keys import KeyRecord
from rolltap.finding import SessionFinding
from rolltap.ledger.audit import AuditEntry
from rolltap.ledger.base import DeadLetter
from rolltap.ledger.submissions import Submission
from rolltap.log_check import LogCheck
from rolltap.tampering import TamperingAct
from rolltap.types import Break, Group, Rollout, VersionSpan


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as they are."""
    return {item.name: getattr(value, item.name) for item in fields(value)}


def content_of(media_type: str, meaning: str, *, format: str | None = None) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that does not answer with JSON."""
    schema = {"type": "string"} | ({"format": format} if format else {})
    return {200: {"description": meaning, "content": {media_type: {"schema": schema}}}}


def packed(meaning: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that answers in the wire format."""
    return content_of(wire.CONTENT_TYPE, meaning, format="binary")


def events(meaning: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of an endless stream of server-sent events."""
    return content_of("text/event-stream", meaning)


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """An error: a code of `rolltap.errors`, a message, and the part of the request that caused it."""

    code: str
    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The body of every error response."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class Alive:
    """The process is running."""

    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a new call could be taken, and which part it waits for.

    `models` is `missing` where an engine that is up did not list a policy's model, `unknown` where an engine is down.
    `weights` is `wrong` while an engine has other weights than a policy's: that policy's calls are refused.
    `tokenizers` is `differ` while an engine has another one than a policy, whose calls are refused then too.
    `clock` is `off` if this machine's clock differs from the store's by over 2 s. `proxies` is `differ` while another
    proxy of the store has other keys or policies.
    """

    status: Literal["ready", "not ready", "stopping"]
    store: Literal["ok", "away"]
    spool: Literal["ok", "full", "none"]
    engines: Literal["up", "down"]
    models: Literal["served", "missing", "unknown"]
    weights: Literal["right", "wrong"] = "right"
    tokenizers: Literal["same", "differ"] = "same"
    clock: Literal["ok", "off"] = "ok"
    proxies: Literal["same", "differ"] = "same"


@dataclass(frozen=True, slots=True)
class RecordedSessionLine:
    """A recorded session. `tampering` counts its agent's attempts; `log_check` is the verdict on the harness's log."""

    id: str
    policy: str
    created_at: float
    expires_at: float
    rollout_id: str | None
    closed_at: float | None
    tags: Mapping[str, str]
    log_check: LogCheck
    tampering: int


@dataclass(frozen=True, slots=True)
class SessionList:
    """Sessions, newest first."""

    sessions: Sequence[RecordedSessionLine]


@dataclass(frozen=True, slots=True)
class ForestCall:
    """A call of a session's forest. `shared` leading tokens of its prompt equal the parent's prompt and output.

    `outcome` is `open` while the call is under way. `delivered` is null where it is not known.
    """

    id: str
    parent_id: str | None
    created_at: float
    dialect: str
    kind: str
    agent: str
    prompt_tokens: int
    output_tokens: int
    shared: int
    break_: Annotated[Break | None, Field(alias="break")]
    outcome: str
    finish: str | None
    flaw: str | None
    error: str
    versions: Sequence[VersionSpan]
    delivered: bool | None


@dataclass(frozen=True, slots=True)
class SessionForest:
    """A session with its calls, a parent before its children, and what is odd about it, the worst first.

    `tampering` counts what its agent tried, by kind.
    """

    id: str
    policy: str
    created_at: float
    expires_at: float
    rollout_id: str | None
    closed_at: float | None
    tags: Mapping[str, str]
    log_check: LogCheck
    tampering: Mapping[str, int]
    findings: Sequence[SessionFinding]
    calls: Sequence[ForestCall]


@dataclass(frozen=True, slots=True)
class TrajectoryReport:
    """What the reconstruction of a session kept and what it left out, in calls and tokens.

    A row is a segment with loss. `kept` is the share of the delivered tokens that carry loss, `trained` that of all
    sampled ones, `merge_ratio` trained calls a row, `saved` the share of tokens that merging saves; each is null where
    there is nothing to divide by.
    """

    trajectories: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    delivered_tokens: int
    trainable_tokens: int
    trained_tokens: int
    trained_calls: int
    call_row_tokens: int
    merged_calls: int
    segments: int
    rows: int
    row_tokens: int
    breaks: int
    kept: float | None
    trained: float | None
    merge_ratio: float | None
    saved: float | None
    calls_by_kind: Mapping[str, int]
    breaks_by_reason: Mapping[str, int]
    masked_calls: Mapping[str, int]
    masked_tokens: Mapping[str, int]
    log_checks: Mapping[str, int]
    findings: Sequence[SessionFinding]


@dataclass(frozen=True, slots=True)
class RolloutWithEvidence(Rollout):
    """A rollout, its evaluator's output, and its agent's attempts to tamper."""

    evaluation: str = ""
    tampering_acts: Sequence[TamperingAct] = ()


@dataclass(frozen=True, slots=True)
class GroupList:
    """A page of groups with their rollouts and rewards."""

    groups: Sequence[Group]


@dataclass(frozen=True, slots=True)
class SubmissionList:
    """Submissions, newest first."""

    submissions: Sequence[Submission]


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Audit entries, newest first."""

    entries: Sequence[AuditEntry]


@dataclass(frozen=True, slots=True)
class KeyList:
    """The minted keys, newest first."""

    keys: Sequence[KeyRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWithSecret(KeyRecord):
    """A key's record with its secret, `key`, which no other answer contains."""

    key: str


@dataclass(frozen=True, slots=True)
class RevokedKeys:
    """The ids of the revoked keys."""

    revoked: Sequence[str]


@dataclass(frozen=True, slots=True)
class DeadLetterList:
    """Groups that failed too often."""

    dead_letters: Sequence[DeadLetter]


@dataclass(frozen=True, slots=True)
class GroupRevived:
    """The group is ready again."""

    group_id: str
