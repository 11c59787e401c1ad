"""What the record keeps of a request beside its tokens, so that the reconstructor can tell later what it was for."""

from __future__ import annotations

from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.types import CallKind, CallShape

DIGEST_BYTES = 8


def shape_of(chat: ChatRequest, plan: PromptPlan) -> CallShape:
    """The evidence for classification. `replies` is counted only where the call does not plainly continue another."""
    forced = chat.tool_choice.mode in ("required", "named") or chat.sampling.json_schema is not None
    apart = plan.parent is None or plan.break_ is not None
    return CallShape(
        tools=len(chat.tools),
        toolset=plan.lineage.tools[:DIGEST_BYTES].hex() if chat.tools else "",
        system=plan.lineage.system[:DIGEST_BYTES].hex(),
        replies=sum(message.role == "assistant" for message in chat.messages) if apart else 0,
        choices=chat.sampling.n,
        constrained=forced,
        role=chat.model if chat.hints.kind == CallKind.MAIN else "",
        quotes=plan.quotes,
    )
