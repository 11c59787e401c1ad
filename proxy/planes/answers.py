"""Response types of the trainer and admin planes that are not types of the glossary, contract or ledger.

OpenAPI has them as the routes' response models. Times are in seconds; those that end in `_at` since the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from rolltap import wire
from rolltap.ledger.groups import DeadLetter
from rolltap.ledger.keys import AuditEntry
from rolltap.ledger.submissions import Submission
from rolltap.types import Group


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
class DeadLetterList:
    """Groups that failed too often."""

    dead_letters: Sequence[DeadLetter]


@dataclass(frozen=True, slots=True)
class GroupRevived:
    """The group is ready again."""

    group_id: str
