"""Chat mode: a chat upstream renders its own prompts, and may return the tokens it used.

The intent is written when the upstream has returned its prompt ids, or else at the end of the reply: an intent holds
only the prompt tokens that the parent does not have, and they are not known earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from rolltap.contract.tags import temperature_of
from rolltap.errors import EngineError, InvalidRequest
from rolltap.protocols.conversation import TOOL_DOCUMENT, TOOL_MEDIA, ChatRequest
from rolltap.proxy.call.arrival import Arrival
from rolltap.proxy.call.http_exchange import HttpExchange
from rolltap.proxy.call.in_flight import InFlightRequest
from rolltap.proxy.call.open_call import OpenCall
from rolltap.proxy.call.reply import ClientReply, dialect_reply
from rolltap.proxy.call.sources.base import Begin, Publish, UpstreamSource, check_ids, marks_of, refused
from rolltap.proxy.call.sources.chat_reply import ChatReplyParser
from rolltap.proxy.call.sources.client_faults import upstream_faults
from rolltap.proxy.call.sources.image_hosts import foreign_image, has_foreign, without_foreign
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.plan import ParentFinder, PromptPlan
from rolltap.proxy.engines.base import ChatCall, ChatChunk, ChatEngine
from rolltap.settings import PolicySettings
from rolltap.types import Flaw


@dataclass(slots=True, eq=False)
class ChatSource(UpstreamSource):
    """A policy behind a chat upstream."""

    settings: PolicySettings
    engine: ChatEngine
    parents: ParentFinder
    knows_prompt: bool = False
    replayable: bool = True
    sets_sampling: bool = True
    relayed_dialects: Sequence[str] = ()
    vocabulary: str = ""
    tokenizer: Any = None

    def check(self, request: ChatRequest) -> None:
        if request.sampling.logprobs:
            raise refused(request, "logprobs", "this policy's model is behind a chat API; it gives no log-probs")
        if self.settings.tool_media == "refuse" and TOOL_DOCUMENT in marks_of(request):
            raise refused(request, "messages", "a tool returned a document, which this policy does not take")
        if url := foreign_image(request, self.settings.image_hosts):
            why = f"the host of the image {url[:80]!r} is not in the policy's image_hosts; send a data URL"
            raise refused(request, "messages", why)
        if request.tool_choice.names and request.tool_choice.mode != "named":
            raise refused(request, "tool_choice", "this policy cannot restrict the choice to some of the tools")

    def unapplied(self, request: ChatRequest, temperature: float | None) -> tuple[str, ...]:
        sampling = request.sampling
        is_ignored = {
            "reasoning_effort": sampling.effort is None and sampling.thinking_budget is not None,
            "thinking": sampling.thinking is False and sampling.effort != "none" and not self.engine.switches_thinking,
            "temperature": temperature is not None and sampling.temperature not in (None, temperature),
        }
        fields = [field for field, ignored in is_ignored.items() if ignored]
        if sampling.keep_thinking is not None:
            fields.append("history_thinking")
        marks = marks_of(request)
        if TOOL_MEDIA in marks and not has_foreign(request, self.settings.image_hosts):
            marks.remove(TOOL_MEDIA)  # the upstream gets all of them
        return (*fields, *request.remarks, *sorted(marks))

    def may_lack_parent(self, plan: PromptPlan, forest: Forest, request: ChatRequest) -> bool:
        return self.parents.may_lack_parent(plan, forest, request)

    def open(self, arrival: Arrival, plan: PromptPlan, call_ids: Sequence[str]) -> list[OpenCall]:
        return [
            OpenCall(call_id, index, plan.node(call_id, arrival.request.items), plan, sent, [])
            for index, call_id in enumerate(call_ids)
            for sent in [self._call(call_id, index, arrival, plan)]
        ]

    async def run(self, call: OpenCall, arrival: Arrival, begin: Begin, publish: Publish) -> None:
        assert isinstance(call.sent, ChatCall)
        mint = self.parents.handles.mint
        parser = ChatReplyParser(arrival.request, lambda position: mint(call.id, position), call.index)
        last = ChatChunk()

        async def take(chunk: ChatChunk) -> bool:
            nonlocal last
            last = chunk
            check_ids(chunk.token_ids)
            if chunk.prompt_ids is not None and not call.node.recorded:
                call.set_plan(self.parents.with_prompt(call.plan, np.asarray(chunk.prompt_ids, np.int32)))
                await begin()
            call.sampled.take_chat(chunk)
            publish(parser.feed(chunk))
            return True

        with upstream_faults(arrival.request, self.settings.pin):
            await self.engine.chat(call.sent, take)
        call.usage = last.usage
        call.unknown_finish = last.unknown_finish
        if last.finish == "abort":
            raise EngineError("the upstream aborted the request")
        if not last.complete or not len(call.prompt):
            call.sampled.clear()
            call.flaw = Flaw.TOKENS_MISSING
        elif parser.unparsable:
            call.flaw = Flaw.TOOL_CALL_UNPARSABLE
        events, call.choice = parser.finish(last.finish or "stop")
        call.complete = True
        publish(events)

    async def count_tokens(self, forest: Forest, request: ChatRequest) -> int:
        raise InvalidRequest(f"the model {request.model!r} is behind a chat API; rolltap cannot count its tokens")

    def reply(self, flight: InFlightRequest, arrival: Arrival, http: HttpExchange) -> ClientReply:
        return dialect_reply(http, arrival.dialect, flight)

    def _call(self, call_id: str, index: int, arrival: Arrival, plan: PromptPlan) -> ChatCall:
        """The upstream request: the conversation with the harness's sampling, overridden by the policy's pins, and by
        the session's temperature."""
        request, session = arrival.request, arrival.session.session
        pins: dict[str, Any] = self.settings.pin.model_dump(exclude_none=True)
        if (temperature := temperature_of(session, arrival.policy.name)) is not None:
            pins["temperature"] = temperature
        sampling = msgspec.structs.replace(request.sampling, seed=request.sampling.choice_seed(index), **pins)
        model = self.settings.model or request.model
        request = msgspec.structs.replace(request, messages=plan.messages)
        if has_foreign(request, self.settings.image_hosts):
            request = without_foreign(request, self.settings.image_hosts)
        return ChatCall(call_id, model, request, sampling, session.id)
