"""Checks where a session may be forked: after a completed call of a policy whose prompts rolltap makes of token ids."""

from __future__ import annotations

from collections.abc import Sequence

from rolltap.calllog.facts import CallLog, CallRow
from rolltap.errors import InvalidRequest, NotFound, RecordCorrupt
from rolltap.proxy.call.policies import Policies
from rolltap.types import Origin, Outcome, RolloutParent, Session


async def check_origin(log: CallLog, policies: Policies, session: Session, origin: Origin) -> None:
    """Raises for an origin in `session` that no session could continue on its very tokens.

    `NotFound` for a call that is not on record in `session`, else `InvalidRequest` with the reason.
    """
    owner = await log.session_of(origin.call_id)
    if owner is None or owner.id != session.id:
        of = f"; it is one of session {owner.id}" if owner is not None else ""
        raise NotFound(f"no call {origin.call_id!r} in session {session.id}{of}", param="call")
    try:
        chain = await log.chain(Origin(session.id, origin.call_id))
    except RecordCorrupt as error:
        raise NotFound(f"call {origin.call_id}: {error.message}", param="call") from error
    if reason := _refusal(chain, policies, session):
        raise InvalidRequest(f"call {origin.call_id} can't be forked: {reason}", param="call")
    done = chain[-1].completion
    size = len(done.output_ids) if done is not None else 0
    if origin.at is not None and not 0 <= origin.at < size:
        message = f"at: the reply has {size} tokens, so 0 to {size - 1} of them can be kept; without `at`, all"
        raise InvalidRequest(message, param="at")
    takes_grammars = getattr(policies[session.policy].source, "grammars", False)
    if origin.at is not None and chain[-1].intent.shape.constrained and not takes_grammars:
        raise InvalidRequest(
            "at: a reply that this engine's grammar limited can't be gone on with in its middle", param="at"
        )


async def origin_of(log: CallLog, policies: Policies, parent: RolloutParent, policy: str) -> Origin:
    """Where the session of a rollout of `policy` begins that was forked from `parent`. Raises as `check_origin`."""
    session = await log.session_of(parent.call_id)
    if session is None or session.rollout_id != parent.rollout_id:
        raise NotFound(f"no call {parent.call_id!r} in rollout {parent.rollout_id}", param="call")
    if session.policy != policy:
        message = f"rollout {parent.rollout_id} is of policy {session.policy!r}, and its fork would be of {policy!r}"
        raise InvalidRequest(message, param="policy")
    origin = Origin(session.id, parent.call_id, parent.at)
    await check_origin(log, policies, session, origin)
    return origin


def _refusal(chain: Sequence[CallRow], policies: Policies, session: Session) -> str:
    """Why the last call of `chain` can't be forked; "" if it can."""
    intent, done = chain[-1].intent, chain[-1].completion
    if done is None:
        return "it is under way"
    if done.outcome is not Outcome.COMPLETED:
        return f"it ended as {done.outcome}"
    if intent.policy != session.policy:
        return f"it is of policy {intent.policy!r}, and the session's is {session.policy!r}"
    if intent.policy not in policies:
        return f"policy {intent.policy!r} is not served"
    source = policies[intent.policy].source
    if not source.knows_prompt or source.tokenizer is None:
        return f"policy {intent.policy!r} has no engine with a token API"
    if not len(chain[-1].prompt_ids) or not len(done.output_ids):
        return "its tokens are not on record"
    if source.tokenizer.lacks([*chain[-1].prompt_ids.tolist(), *done.output_ids.tolist()]):
        return f"it has ids that the tokenizer of policy {intent.policy!r} does not have"
    return "" if intent.lineage else "its place in the conversation is not on record"
