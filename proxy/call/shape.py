"""The request features that the record keeps beside the tokens: the reconstructor classifies calls by them."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from rolltap.protocols.conversation import ChatRequest, ToolChoice
from rolltap.protocols.thinking import asked_effort
from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.types import CallKind, CallShape

DIGEST_BYTES = 8
SYSTEM_ROLES = ("system", "developer")
NOTHING_ASKED = ToolChoice(), None, "", None


def shape_of(chat: ChatRequest, plan: PromptPlan, unapplied: tuple[str, ...]) -> CallShape:
    """The features for classification. `replies` is counted only if the call does not continue another without a break.

    `unapplied`: request fields that the source accepts and ignores.
    """
    must_call = chat.tool_choice.mode in ("required", "named") and "tool_choice" not in unapplied
    # What follows a call's beginning is sampled freely, without a schema.
    is_free = plan.lineage.call_beginning > 0
    forced = not is_free and (must_call or chat.sampling.json_schema is not None)
    apart = plan.parent is None or plan.break_ is not None
    return CallShape(
        tools=len(chat.tools),
        toolset=plan.lineage.tools[:DIGEST_BYTES].hex() if chat.tools else "",
        system=plan.lineage.system[:DIGEST_BYTES].hex(),
        replies=sum(message.role == "assistant" for message in chat.messages) if apart else 0,
        choices=chat.sampling.n,
        constrained=forced,
        manner=f"{chat.model}, {'streamed' if chat.stream else 'whole'}",
        unapplied=unapplied,
        asked=_asked(chat),
        role=chat.model if chat.hints.kind == CallKind.MAIN else "",
        quotes=plan.quotes,
        fitted=plan.fitted,
        follows=plan.follows if apart else "",
        ends=next((message.role for message in reversed(chat.messages) if message.role not in SYSTEM_ROLES), ""),
    )


def _asked(chat: ChatRequest) -> str:
    """A digest of the request's demands that its prompt does not show. Requests with different ones are no retries.

    Seeds, temperatures and token limits don't count, as clients change them between tries.
    """
    demands = chat.tool_choice, chat.sampling.thinking, asked_effort(chat.sampling), chat.sampling.json_schema
    if demands == NOTHING_ASKED:
        return ""
    return blake2b(msgspec.json.encode(demands, order="sorted"), digest_size=DIGEST_BYTES).hexdigest()
