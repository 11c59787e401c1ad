"""OpenAI's legacy Completions: `POST /v1/completions`.

The prompt is one user message: policies are chat models, and a raw prompt would bypass the chat template, on which the
record depends. Prompts of token ids are refused for the same reason. The protocol has no field for thinking, so replies
omit it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from rolltap.errors import RolltapError
from rolltap.protocols.base import Dialect, Route, WireReply, WireRequest
from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    Message,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    Sampling,
    Text,
    TextDelta,
    TokenLogprob,
)
from rolltap.protocols.hints import read_hints
from rolltap.protocols.openai_chat import wire
from rolltap.protocols.openai_chat.read import ChatReader
from rolltap.protocols.openai_chat.write import DONE, usage_out
from rolltap.protocols.replies import (
    COMMENT,
    EVENT_STREAM,
    OPENAI_ENVIRONMENT,
    encode,
    openai_error,
    openai_key,
    unnamed_event,
)
from rolltap.protocols.requests import cut, decode, entries, invalid

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for requests without `max_tokens`."""


class Head(Struct, forbid_unknown_fields=True):
    """The body without `prompt`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: wire.StreamOptions | None = None
    max_tokens: wire.TokenLimit | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stop: wire.StopText | Annotated[list[wire.StopText], Meta(max_length=wire.MAX_STOPS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=wire.MAX_CHOICES)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    presence_penalty: wire.Penalty | None = None
    frequency_penalty: wire.Penalty | None = None
    # accepted only with a value that requests nothing
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=0)] | None = None
    # no effect
    user: str | None = None


class LogprobsOut(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class ChoiceOut(Struct):
    text: str
    index: int
    finish_reason: str | None = None
    logprobs: LogprobsOut | None = None


class Completion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChoiceOut]
    object: str = "text_completion"
    usage: wire.UsageOut | None = None


class OpenAICompletions(Dialect):
    """The dialect of legacy scripts."""

    name = "openai_completions"
    items_field = "prompt"
    field_names: Mapping[str, str] = {"messages": "prompt"}
    routes: Sequence[Route] = (Route("POST", "/v1/completions", "generate"),)
    stream_url = "/v1/completions"
    client_environment = OPENAI_ENVIRONMENT
    reply_reader = ChatReader

    def key(self, request: WireRequest) -> str | None:
        return openai_key(request.headers)

    def parse(self, request: WireRequest) -> ChatRequest:
        body = cut(request.body, ("prompt",))
        head = decode(body.head, Head)
        if "prompt" not in body.fields:
            raise invalid("prompt", "this field is required")
        raw = body.fields["prompt"]
        stop = (head.stop,) if isinstance(head.stop, str) else tuple(head.stop or ())
        return ChatRequest(
            dialect=self.name,
            model=head.model,
            messages=(Message("user", (Text(_prompt(raw)),)),),
            sampling=Sampling(
                temperature=head.temperature,
                top_p=head.top_p,
                max_tokens=DEFAULT_MAX_TOKENS
                if head.max_tokens is None
                else wire.token_limit(head.max_tokens, "max_tokens"),
                stop=stop,
                seed=head.seed,
                n=head.n or 1,
                presence_penalty=head.presence_penalty,
                frequency_penalty=head.frequency_penalty,
                logprobs=head.logprobs is not None,
                top_logprobs=head.logprobs or 0,
            ),
            stream=bool(head.stream),
            hints=read_hints(request.headers),
            head=body.head,
            items=(raw,) if raw.startswith(b'"') else tuple(entries(raw, "prompt")),
            wire={"include_usage": bool(head.stream_options and head.stream_options.include_usage)},
        )

    def writer(self, request: ChatRequest) -> CompletionsWriter:
        return CompletionsWriter(request)

    def reply(self, request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
        choices = [_choice(choice, choice.message.text) for choice in ended.choices]
        usage = usage_out(ended.usage)
        return encode(Completion(_id(started), started.created, request.model, choices, usage=usage))

    def error(self, error: RolltapError) -> WireReply:
        return openai_error(error)


def _prompt(raw: bytes) -> str:
    value: Any = decode(raw, object, "prompt")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise invalid("prompt", "expected one text; token ids and several prompts are not supported")
    return value


def _id(started: ReplyStarted) -> str:
    return f"cmpl-{started.call_id}"


def _choice(choice: Choice, text: str) -> ChoiceOut:
    finish = "length" if choice.finish == "length" else "stop"
    return ChoiceOut(text, choice.index, finish, _logprobs(choice.logprobs))


def _logprobs(logprobs: Sequence[TokenLogprob] | None) -> LogprobsOut | None:
    if logprobs is None:
        return None
    offsets: list[int] = []
    end = 0
    for entry in logprobs:
        offsets.append(end)
        end += len(entry.token)
    return LogprobsOut(
        [entry.token for entry in logprobs],
        [entry.logprob for entry in logprobs],
        [dict(entry.top) for entry in logprobs],
        offsets,
    )


class CompletionsWriter:
    """Writes chunks of text, the finish of each choice, usage if requested, `[DONE]`."""

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest) -> None:
        self._usage: bool = request.wire["include_usage"]
        self._base = Completion("", 0, request.model, [])

    def write(self, event: ReplyEvent) -> bytes:
        match event:
            case TextDelta(text, index):
                return self._chunk([ChoiceOut(text, index)])
            case ReplyStarted():
                self._base.id, self._base.created = _id(event), event.created
            case ReplyEnded():
                chunks = b"".join(self._chunk([_choice(choice, "")]) for choice in event.choices)
                return chunks + (self._chunk([], usage_out(event.usage)) if self._usage else b"") + DONE
        return b""

    def keep_alive(self) -> bytes:
        return COMMENT

    def _chunk(self, choices: list[ChoiceOut], usage: wire.UsageOut | None = None) -> bytes:
        return unnamed_event(msgspec.structs.replace(self._base, choices=choices, usage=usage))
