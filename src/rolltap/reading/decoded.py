"""A session, read and reconstructed, with the facts about its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rolltap.calllog.facts import CallRow
from rolltap.calllog.sessions import StoredSessions, decode_session
from rolltap.reading.conversations import preview, reply_view
from rolltap.reading.tokens import Context
from rolltap.reading.types import OPEN, CallLine, MessageView
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import Rules
from rolltap.types import Break, Classification, Outcome, Session, Trajectory

COMPARED = 64
"""Maximum earlier calls whose tokens are compared with a broken call's, to find the one that it follows longest."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedSession:
    """A session with its calls in order, without their requests, and its trajectory."""

    session: Session
    rows: Mapping[str, CallRow]
    models: Mapping[str, str]
    trajectory: Trajectory
    purposes: Mapping[str, Classification]
    breaks: Mapping[str, Break]  # as recorded by the proxy, else as found by the reconstruction
    retries: Mapping[str, str]  # from a call to the earlier one with the same request

    @classmethod
    def of(cls, stored: StoredSessions, rules: Callable[[Session], Rules]) -> DecodedSession:
        session, rows, models = decode_session(stored)
        trajectory = reconstruct((row.call() for row in rows), rules=rules(session))
        recorded = {row.intent.id: row.intent.break_ for row in rows if row.intent.break_ is not None}
        return cls(
            session=session,
            rows={row.intent.id: row for row in rows},
            models=models,
            trajectory=trajectory,
            purposes={purpose.call_id: purpose for purpose in trajectory.classifications},
            breaks={**{break_.call_id: break_ for break_ in trajectory.breaks}, **recorded},
            retries=_retries(rows),
        )

    def context(self, call_id: str) -> Context:
        """Returns the call's tokens."""
        return Context.of(self.rows[call_id], trained=self.purposes[call_id].mask == "")

    def before(self, call_id: str) -> list[str]:
        """Returns the calls to compare with a broken call: the parent that its break names, and those after it.

        These are at most the last `COMPARED` calls.
        """
        ids = list(self.rows)
        parent_id = self.breaks[call_id].parent_id
        first = ids.index(parent_id) if parent_id is not None and parent_id in self.rows else 0
        last = ids.index(call_id)
        return ids[max(first, last - COMPARED) : last]

    def reply(self, call_id: str) -> MessageView | None:
        completion = self.rows[call_id].completion
        return reply_view(completion.message) if completion is not None else None

    def line(self, call_id: str) -> CallLine:
        row, purpose = self.rows[call_id], self.purposes[call_id]
        intent, completion = row.intent, row.completion
        prompt_tokens, output_tokens = row.token_counts()
        text, tool_calls = preview(completion.message) if completion is not None else ("", ())
        return CallLine(
            id=call_id,
            session_id=self.session.id,
            parent_id=intent.parent_id,
            policy=intent.policy,
            agent=purpose.agent,
            kind=purpose.kind.value,
            rule=purpose.rule,
            mask=purpose.mask,
            created_at=intent.created_at,
            finished_at=completion.finished_at if completion is not None else None,
            dialect=intent.dialect,
            model=self.models[call_id],
            engine=completion.engine if completion is not None else "",
            outcome=completion.outcome.value if completion is not None else _unfinished(row),
            finish=completion.finish.value if completion is not None else None,
            flaw=completion.flaw.value if completion is not None and completion.flaw is not None else None,
            error=completion.error if completion is not None else "",
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared=intent.shared,
            break_=self.breaks.get(call_id),
            versions=completion.versions if completion is not None else (),
            delivered=row.delivered,
            retry_of=self.retries.get(call_id),
            preview=text,
            tool_calls=tool_calls,
            fitted=intent.shape.fitted,
            token_ids=len(row.prompt_ids) > 0 or (completion is not None and len(completion.output_ids) > 0),
        )


def _unfinished(row: CallRow) -> str:
    return Outcome.ABORTED.value if row.delivered is False else OPEN


def _retries(rows: list[CallRow]) -> dict[str, str]:
    """Calls of one request (`n` choices) have one body and start together: they are not retries of each other."""
    first: dict[str, CallRow] = {}
    retries: dict[str, str] = {}
    for row in rows:
        if not row.intent.body_hash:
            continue
        earlier = first.setdefault(row.intent.body_hash, row)
        ended_at = earlier.completion.finished_at if earlier.completion is not None else None
        if earlier is not row and ended_at is not None and ended_at <= row.intent.created_at:
            retries[row.intent.id] = earlier.intent.id
    return retries
