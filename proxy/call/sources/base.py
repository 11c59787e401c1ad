"""The seam between the path of a call and where its reply comes from: three sources behind one Protocol.

    tokens        an engine's token API: the prompt is planned here, the reply parsed from its ids
    chat          a chat upstream, which renders its prompts itself and may say which tokens it used
    passthrough   a vendor: the harness's own bytes go there and the vendor's own bytes come back

A source is one file. It writes nothing: the path (`rolltap.proxy.call.path`) records intent and completion.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rolltap.errors import EngineProtocolError, InvalidRequest
from rolltap.proxy.call.events import CallEvent
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.proxy.conversation.chat import ChatRequest, TokenLogprob
from rolltap.proxy.dialects import known_dialects
from rolltap.proxy.engines.base import EngineFacts

if TYPE_CHECKING:
    from rolltap.proxy.call.arrival import Arrival
    from rolltap.proxy.call.in_flight import InFlightRequest
    from rolltap.proxy.call.open_call import OpenCall
    from rolltap.proxy.call.reply import ClientReply

Begin = Callable[[], Awaitable[None]]
"""Records the call's intent. A source that does not know the prompt beforehand calls it once the upstream has told."""

Publish = Callable[[Sequence[CallEvent]], None]

IDS = 1 << 31
"""Token ids are less: the record holds them as int32."""


def check_ids(ids: Sequence[int]) -> None:
    """`EngineProtocolError` where an engine gave a number that is no token's id."""
    if len(ids) and not 0 <= min(ids) <= max(ids) < IDS:
        raise EngineProtocolError("the engine gave a token id that is none: negative, or 2^31 or more")


class Source(Protocol):
    """Where a policy's replies come from."""

    knows_prompt: bool
    """The intent is recorded before the source runs. Without it `run` says when."""

    replayable: bool
    """A client that retries may join a request in flight, or get a reply that missed it."""

    def unapplied(self, request: ChatRequest) -> tuple[str, ...]:
        """The fields of `request`, as `openai_chat` names them, that are taken and change nothing: findings say so."""
        ...

    def effort(self, request: ChatRequest) -> str:
        """The level that the prompt of `request` says; "" for that of no level, or where prompts are not made here."""
        ...

    @property
    def vocabulary(self) -> str:
        """The hash of the tokenizer that the tokens are of; empty where it is the upstream's own."""
        ...

    def learn(self, facts: EngineFacts) -> None:
        """Takes over what the engine said of itself."""
        ...

    def check(self, request: ChatRequest) -> None:
        """Refuses, by the field's name, what can't be done here: nothing is ignored in silence."""
        ...

    async def plan(self, call_id: str, forest: Forest, request: ChatRequest) -> PromptPlan:
        """Where the call belongs in its session, and the prompt where it is made here."""
        ...

    def may_lack_parent(self, plan: PromptPlan, forest: Forest, request: ChatRequest) -> bool:
        """Whether the call that the request continues may be one that this process has not seen."""
        ...

    def open(self, arrival: Arrival, plan: PromptPlan, call_ids: Sequence[str]) -> list[OpenCall]:
        """A call for each choice of the request; `ContextOverflow` if the prompt leaves no room."""
        ...

    async def run(self, call: OpenCall, arrival: Arrival, begin: Begin, publish: Publish) -> None:
        """Gets the reply: fills in the call and publishes its events. Returns when the reply has ended."""
        ...

    async def count_tokens(self, forest: Forest, request: ChatRequest) -> int:
        """How many tokens the prompt would have."""
        ...

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...] | None:
        """Sampled tokens as a client that asked for log-probs sees them; None where there are none to show."""
        ...

    def reply(self, flight: InFlightRequest, arrival: Arrival, http: Any) -> ClientReply:
        """What writes the reply to one client."""
        ...


def refused(request: ChatRequest, field: str, why: str) -> InvalidRequest:
    """A refusal that names the field, `field` in `openai_chat`, as the request's dialect does."""
    name = known_dialects()[request.dialect].field_names.get(field, field)
    return InvalidRequest(f"{name}: {why}", param=name)
