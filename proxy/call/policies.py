"""What a policy is at run time: its engine, its renderer, its version, and the sampling it pins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from rolltap.errors import ContextOverflow, InvalidRequest, NotFound, Unauthenticated
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.plan import Continuation, Lineages, PromptPlan, Step, weight
from rolltap.proxy.conversation.chat import ChatRequest, Sampling, TokenLogprob
from rolltap.proxy.dialects import known_dialects
from rolltap.proxy.engines.base import ChatCall, ChatEngine, Engine, EngineFacts, SampleRequest
from rolltap.proxy.engines.passthrough import PassthroughUpstream
from rolltap.settings import PolicySettings

DEFAULT_MAX_CONTEXT = 32_768

ENCODED_INLINE = 16_384
"""Bytes of new text up to which it is encoded where it stands: some 10 ms of work."""

SAMPLE = 8
"""Characters per token of context that are looked at of a text that may be far too long; usual text has 4."""


def refused(chat: ChatRequest, field: str, why: str) -> InvalidRequest:
    """A refusal that names the field, `field` in `openai_chat`, as the request's dialect does."""
    name = known_dialects()[chat.dialect].field_names.get(field, field)
    return InvalidRequest(f"{name}: {why}", param=name)


@dataclass(slots=True, eq=False)
class PolicyRuntime:
    """A served policy. `version` is that of tokens sampled from now on, where the engine does not say it itself."""

    name: str
    settings: PolicySettings
    engine: Engine
    continuation: Continuation
    max_context: int = DEFAULT_MAX_CONTEXT
    version: int = 0
    logprobs_mode: str = "unknown"
    weight_versions: bool = False  # the engine says every token's version
    structured_output: bool = True
    up: bool = False  # the engine has answered a probe

    def learn(self, facts: EngineFacts) -> None:
        """Takes over what the engine said of itself."""
        self.max_context = self.settings.max_context or facts.max_context or self.max_context
        self.logprobs_mode = facts.logprobs_mode
        self.weight_versions = facts.weight_versions
        self.structured_output = facts.structured_output
        self.up = True

    @property
    def lineages(self) -> Lineages:
        """What places this policy's calls."""
        return self.continuation

    @property
    def vocabulary(self) -> str:
        """The hash of the tokenizer that tokens of this policy are of."""
        return self.continuation.renderer.tokenizer.hash

    async def plan(self, call_id: str, forest: Forest, chat: ChatRequest) -> PromptPlan:
        """The prompt, and where the call belongs. Long text is encoded in a thread: other calls go on meanwhile."""
        if weight(chat) > SAMPLE * self.max_context:
            await asyncio.to_thread(self._check_length, chat)
        step = self.continuation.begin(call_id, forest, chat, thinking=thinks(self.settings, chat.sampling))
        try:
            while isinstance(step, Step):
                step = step.run() if step.weight <= ENCODED_INLINE else await asyncio.to_thread(step.run)
        except InvalidRequest as error:
            raise refused(chat, "messages", error.message) from error
        return step

    def _check_length(self, chat: ChatRequest) -> None:
        """Refuses a prompt that is far too long by the beginning of its longest text.

        Encoding 50 MB takes half a minute and gigabytes. Tokens of a beginning are those of the whole but for the
        last word; to be sure, they must be half as many again as fit.
        """
        text = max((message.text for message in chat.messages if message.role in ("user", "tool")), key=len, default="")
        if len(text) <= SAMPLE * self.max_context:
            return
        tokenizer = self.continuation.renderer.tokenizer
        tokens = len(tokenizer.encode(tokenizer.guard(text[: SAMPLE * self.max_context])))
        if tokens > 1.5 * self.max_context:
            raise self._overflow(tokens)

    def _overflow(self, tokens: int) -> ContextOverflow:
        message = f"the prompt has at least {tokens} tokens; policy {self.name!r} takes {self.max_context} in all"
        return ContextOverflow(message, tokens=tokens, limit=self.max_context)

    def check(self, chat: ChatRequest) -> None:
        """Refuses what this policy's engine can't do, by the field's name; nothing is ignored in silence."""
        if chat.tool_choice.mode in ("required", "named") or chat.tool_choice.names:
            why = "this policy can't force a tool call: its tokens would not be the model's own; ask for auto or none"
            raise refused(chat, "tool_choice", why)
        if chat.sampling.json_schema is not None and not self.structured_output:
            raise refused(chat, "response_format", "this policy's engine has no structured output")
        if chat.sampling.top_logprobs:
            raise refused(chat, "top_logprobs", "this policy gives the sampled token's log-prob only")

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...]:
        """Sampled tokens as a client that asked for log-probs sees them; ids whose log-prob is missing are left out."""
        token = self.continuation.renderer.tokenizer.token
        return tuple(TokenLogprob(token(id), logprob) for id, logprob in zip(ids, logprobs, strict=False))

    def sample_request(
        self, call_id: str, session_id: str, chat: ChatRequest, prompt_ids: Sequence[int]
    ) -> SampleRequest:
        """What is sent to the engine; `ContextOverflow` if the prompt leaves no room."""
        room = self.max_context - len(prompt_ids)
        if room < 1:
            raise self._overflow(len(prompt_ids))
        asked, pin = chat.sampling, self.settings.pin
        penalties = {
            name: value
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty")
            if (value := getattr(asked, name)) is not None
        }
        if asked.json_schema is not None:
            penalties["json_schema"] = asked.json_schema
        return SampleRequest(
            id=call_id,
            model=self.settings.model or self.name,
            prompt_ids=prompt_ids,
            max_tokens=min(room, _first(pin.max_tokens, asked.max_tokens, room)),
            temperature=_first(pin.temperature, asked.temperature, 1.0),
            top_p=_first(pin.top_p, asked.top_p, 1.0),
            top_k=_first(pin.top_k, asked.top_k, 0),
            min_p=_first(pin.min_p, asked.min_p, 0.0),
            seed=asked.seed,
            stop_token_ids=self.continuation.renderer.stop_token_ids,
            top_logprobs=self.settings.top_logprobs,
            routed_experts=self.settings.routed_experts,
            session_id=session_id,
            extra=penalties,
        )


Upstream = TypeVar("Upstream", ChatEngine, PassthroughUpstream)


@dataclass(slots=True, eq=False)
class UpstreamPolicy(Generic[Upstream]):
    """A policy whose upstream renders its prompts itself."""

    name: str
    settings: PolicySettings
    engine: Upstream
    lineages: Lineages
    version: int = 0
    logprobs_mode: str = "unknown"
    weight_versions: bool = False
    up: bool = False
    vocabulary: str = ""  # the upstream's own; not known here

    def learn(self, facts: EngineFacts) -> None:
        """Takes over what the upstream said of itself."""
        self.logprobs_mode = facts.logprobs_mode
        self.up = True

    async def plan(self, call_id: str, forest: Forest, chat: ChatRequest) -> PromptPlan:
        """Where the call belongs; its prompt is the upstream's to tell."""
        return self.lineages.observe(call_id, forest, chat)

    def sample_request(self, call_id: str, session_id: str, chat: ChatRequest, prompt_ids: Sequence[int]) -> ChatCall:
        """What is sent to the upstream: the conversation, and the sampling that the policy or the harness decided."""
        pins = {name: value for name, value in self.settings.pin.model_dump().items() if value is not None}
        sampling = msgspec.structs.replace(chat.sampling, **pins)
        return ChatCall(call_id, self.settings.model or chat.model, chat, sampling, session_id)


class CapturePolicy(UpstreamPolicy[ChatEngine]):
    """A policy behind a chat upstream (capture mode), which is listened to."""

    __slots__ = ()

    def check(self, chat: ChatRequest) -> None:
        """Refuses what an upstream can't be asked for, by the field's name."""
        if chat.sampling.logprobs:
            raise refused(chat, "logprobs", "this policy's model is behind a chat API; it gives no log-probs")
        if chat.tool_choice.names and chat.tool_choice.mode != "named":
            raise refused(chat, "tool_choice", "this policy can't allow some tools only")


class PassthroughPolicy(UpstreamPolicy[PassthroughUpstream]):
    """A vendor's models. A harness's own calls are relayed; nothing else reaches it."""

    __slots__ = ()

    def check(self, chat: ChatRequest) -> None:
        """Refuses every call that was not relayed."""
        raise self.refusal()

    def refusal(self) -> Unauthenticated:
        """For a call that came without the key that this vendor's calls are made with, or in another protocol."""
        key = "a key of rolltap's" if self.engine.keyed else "the vendor's own key, not rolltap's"
        spoken = ", ".join(self.engine.dialects)
        return Unauthenticated(f"policy {self.name!r} relays calls to its vendor: send {key}; it speaks {spoken}")


Policy = PolicyRuntime | CapturePolicy | PassthroughPolicy


def thinks(settings: PolicySettings, asked: Sampling) -> bool:
    """Whether a call thinks: the policy's pin, else what the harness asked, else yes."""
    if settings.pin.thinking is not None:
        return settings.pin.thinking
    return asked.thinking if asked.thinking is not None else True


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


class Policies:
    """The served policies by name, and the model names that lead to them."""

    def __init__(self, runtimes: Mapping[str, Policy]) -> None:
        self._runtimes = dict(runtimes)

    def __getitem__(self, name: str) -> Policy:
        try:
            return self._runtimes[name]
        except KeyError:
            raise NotFound(f"no policy {name!r}; served: {', '.join(self._runtimes)}", param="policy") from None

    def __iter__(self):
        return iter(self._runtimes.values())

    @property
    def names(self) -> list[str]:
        return list(self._runtimes)

    def resolve(self, model: str, bound: str, *, captured: bool = False) -> Policy:
        """The policy for a request that asks for `model` in a session bound to policy `bound`.

        A trainable policy is reached only by its own sessions; frozen ones by any. In a captured session every name
        leads to the bound policy: the harness was not told which models are served.
        """
        for runtime in self._runtimes.values():
            named = model == runtime.name or model in runtime.settings.aliases
            if named and (runtime.name == bound or not runtime.settings.trainable):
                return runtime
        if captured:
            return self[bound]
        served = ", ".join(self.served(bound))
        raise NotFound(f"the model {model!r} is not served here; served: {served}", param="model")

    def for_model(self, model: str) -> str:
        """The policy that a captured session for `model` is bound to: the one of that name or alias, else the first."""
        for runtime in self:
            if model == runtime.name or model in runtime.settings.aliases:
                return runtime.name
        return next(iter(self._runtimes))

    def served(self, bound: str) -> list[str]:
        """The model names that a session of policy `bound` may ask for."""
        own = self[bound]
        frozen = [runtime for runtime in self if not runtime.settings.trainable and runtime is not own]
        return [name for runtime in (own, *frozen) for name in (runtime.name, *runtime.settings.aliases)]
