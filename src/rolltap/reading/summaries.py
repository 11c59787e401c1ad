"""A session's summary, made of its calls' outlines, the ledger and its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rolltap.calllog.notes import Note, tags_after
from rolltap.calllog.outlines import CallOutline
from rolltap.ledger.views import SessionOrigin
from rolltap.reading.types import SessionSummary
from rolltap.types import EVALUATION, PURPOSE_TAG, Outcome, Session, Task


def summary_of(
    session: Session,
    calls: Sequence[CallOutline],
    origin: SessionOrigin | None,
    notes: Sequence[Note],
    tampering: int = 0,
    opening: str = "",
) -> tuple[SessionSummary, tuple[str, ...]]:
    """Returns the summary, and the tags of the session's group and task.

    A rollout's reward belongs to its last attempt: the sessions of earlier attempts have none.
    """
    tags = tags_after(session.tags, notes)
    is_last_attempt = origin is not None and origin.rollout.session_id in (None, session.id)
    summary = SessionSummary(
        id=session.id,
        policy=session.policy,
        created_at=session.created_at,
        expires_at=session.expires_at,
        closed_at=session.closed_at,
        rollout_id=session.rollout_id,
        group_id=origin.group.id if origin else None,
        task_id=origin.task.id if origin else None,
        status=origin.rollout.status.value if origin and is_last_attempt else None,
        harness=harness_of(tags.get("harness"), origin.task if origin else None),
        models=tuple(dict.fromkeys(call.model for call in calls if call.model)),
        dialects=tuple(dict.fromkeys(call.dialect for call in calls)),
        tags=tags,
        purpose=_purpose(tags, origin),
        opening=opening,
        calls=len(calls),
        open_calls=sum(call.outcome is None for call in calls),
        prompt_tokens=sum(call.prompt_tokens for call in calls),
        output_tokens=sum(call.output_tokens for call in calls),
        breaks=sum(call.broken for call in calls),
        flaws=sum(call.flaw is not None for call in calls),
        errors=sum(call.outcome not in (None, Outcome.COMPLETED) for call in calls),
        agents=len({call.agent for call in calls}),
        tampering=tampering,
        log_check=session.log_check.verdict,
        oldest_version=min((call.versions[0] for call in calls if call.versions), default=None),
        newest_version=max((call.versions[1] for call in calls if call.versions), default=None),
        first_call_at=min((call.created_at for call in calls), default=None),
        last_call_at=max((call.finished_at or call.created_at for call in calls), default=None),
        reward=origin.reward if origin and is_last_attempt else None,
        scores={note.name: float(note.value) for note in notes if note.kind == "score" and note.call_id is None},  # type: ignore[arg-type]
        labels=_labels(notes),
    )
    group_tags = (*origin.group.tags, *origin.task.tags) if origin else ()
    return summary, group_tags


def _purpose(tags: Mapping[str, str], origin: SessionOrigin | None) -> str:
    """Returns what a session is for: an evaluation, training if it is a rollout, else nothing ("")."""
    of_group = origin.group.tags if origin is not None else ()
    if tags.get(PURPOSE_TAG) == EVALUATION or f"{PURPOSE_TAG}={EVALUATION}" in of_group:
        return "evaluation"
    return "training" if origin is not None else ""


def harness_of(tag: str | None, task: Task | None) -> str:
    """Returns the harness that ran: from the session's tag, else from the task."""
    harness = task.spec.get("harness", "") if task is not None else ""
    return tag or (harness if isinstance(harness, str) else "")


def _labels(notes: Sequence[Note]) -> tuple[str, ...]:
    """Returns the labels of the whole session: `name`, or `name=value` if it has a value."""
    last_values = {note.name: note.value for note in notes if note.kind == "label" and note.call_id is None}
    return tuple(f"{name}={value}" if value else name for name, value in last_values.items())
