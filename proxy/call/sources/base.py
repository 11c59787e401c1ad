"""The Protocol of a source: the place that a call's reply comes from. There are three.

    tokens        an engine's token API: rolltap plans the prompt and parses the reply from its token ids
    chat          a chat upstream: it renders its prompts itself and may return the tokens it used
    passthrough   a vendor: the harness's bytes are sent there, and the vendor's bytes are returned unchanged

A source is one file. It records nothing: the path (`rolltap.proxy.call.path`) writes intent and completion.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rolltap.errors import EngineProtocolError, InvalidRequest
from rolltap.protocols.conversation import ChatRequest, TokenLogprob
from rolltap.protocols.dialects import known_dialects
from rolltap.proxy.call.events import CallEvent
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.plan import ParentFinder, PromptPlan
from rolltap.proxy.engines.base import EngineFacts

if TYPE_CHECKING:
    from rolltap.proxy.call.arrival import Arrival
    from rolltap.proxy.call.in_flight import InFlightRequest
    from rolltap.proxy.call.open_call import OpenCall
    from rolltap.proxy.call.reply import ClientReply

Begin = Callable[[], Awaitable[None]]
"""Records the call's intent. A source without `knows_prompt` calls it when the upstream has returned its prompt ids."""

Publish = Callable[[Sequence[CallEvent]], None]

IDS = 1 << 31
"""Exclusive upper bound of token ids: the record holds them as int32."""


def check_ids(ids: Sequence[int]) -> None:
    """Raises `EngineProtocolError` for a number that cannot be a token id."""
    if len(ids) and not 0 <= min(ids) <= max(ids) < IDS:
        raise EngineProtocolError("the engine returned an invalid token id: negative, or 2^31 or more")


class Source(Protocol):
    """The place that a policy's replies come from."""

    knows_prompt: bool
    """The prompt is known before `run`, so the path records the intent first. Otherwise `run` calls `begin`."""

    replayable: bool
    """A client that retries may join a request in flight, or receive a finished reply that did not reach it."""

    sets_sampling: bool
    """The policy's settings and its trainer's control go over what the request asks of sampling."""

    @property
    def relayed_dialects(self) -> Sequence[str]:
        """The dialects whose calls go to a vendor under the user's own key; empty where rolltap's keys are taken."""
        ...

    def unapplied(self, request: ChatRequest, temperature: float | None) -> tuple[str, ...]:
        """The request's fields (by their `openai_chat` names) that are accepted and have no effect.

        Findings list them. `temperature` is the one that was set for the session, if any.
        """
        ...

    def effort(self, request: ChatRequest) -> str:
        """The effort level in the rendered prompt; "" if it has none, or if the upstream renders the prompt."""
        ...

    @property
    def vocabulary(self) -> str:
        """The hash of the policy's tokenizer; empty if only the upstream knows it."""
        ...

    def learn(self, facts: EngineFacts) -> None:
        """Stores the facts that the engine's probe returned."""
        ...

    def check(self, request: ChatRequest) -> None:
        """Refuses what the source cannot do. The error names the field; nothing is ignored silently."""
        ...

    async def plan(self, call_id: str, forest: Forest, request: ChatRequest) -> PromptPlan:
        """The call's place in its session, and its prompt if rolltap renders it."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer; None if the engine's own is used."""
        ...

    def may_lack_parent(self, plan: PromptPlan, forest: Forest, request: ChatRequest) -> bool:
        """Whether the request may continue a call that this process has not loaded."""
        ...

    def open(self, arrival: Arrival, plan: PromptPlan, call_ids: Sequence[str]) -> list[OpenCall]:
        """One call for each choice of the request. Raises `ContextOverflow` if the prompt leaves no room."""
        ...

    async def run(self, call: OpenCall, arrival: Arrival, begin: Begin, publish: Publish) -> None:
        """Gets the reply, stores it in the call and publishes its events. Returns when the reply has ended."""
        ...

    async def count_tokens(self, forest: Forest, request: ChatRequest) -> int:
        """The number of tokens in the request's prompt."""
        ...

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...] | None:
        """Sampled tokens in the form for a client that asks for log-probs; None if the source has none."""
        ...

    def reply(self, flight: InFlightRequest, arrival: Arrival, http: Any) -> ClientReply:
        """The writer of the reply to one client."""
        ...


class UpstreamSource:
    """The common part of chat and passthrough: the upstream renders the prompt, and rolltap only finds the parent."""

    __slots__ = ()

    parents: ParentFinder

    def learn(self, facts: EngineFacts) -> None:
        """Stores nothing: no fact matters here."""

    def effort(self, request: ChatRequest) -> str:
        return ""

    async def plan(self, call_id: str, forest: Forest, request: ChatRequest) -> PromptPlan:
        return self.parents.observe(call_id, forest, request)

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...] | None:
        return None


def marks_of(request: ChatRequest) -> set[str]:
    """The marks of the request's messages."""
    return {mark for message in request.messages if message.marks for mark in message.marks}


def refused(request: ChatRequest, field: str, why: str) -> InvalidRequest:
    """An error that names the field in the request's dialect. `field` is its `openai_chat` name.

    `wire["names"]`: names that depend on the request, where a dialect has several for one thing.
    """
    names = {**known_dialects()[request.dialect].field_names, **request.wire.get("names", {})}
    name = names.get(field, field)
    return InvalidRequest(f"{name}: {why}", param=name)
