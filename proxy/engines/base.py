"""The engine seam: token ids in, token ids with log-probs and weight versions out.

An engine client is one file and one line in `rolltap.proxy.engines.ENGINES` (a chat upstream: in `CHAT_ENGINES`). It
knows nothing of dialects.
Contract, held by `tests/contract/test_engine*.py`: chunks come in order; the last one has `finish`; log-probs are
one per id or the chunk says they are missing (`logprobs` None), never filled in; a request that is given up (cancelled,
or `take` returned False) is cancelled on the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from rolltap.contract.trainer import TokenScores
from rolltap.proxy.conversation.chat import ChatRequest, Sampling, Usage
from rolltap.proxy.engines.receivers import Receiver
from rolltap.types import VersionSpan

PauseMode = Literal["keep", "drain", "abort"]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """What is asked of an engine. `prompt_ids` is final: an engine never adds or removes a token.

    Without `stream` nobody reads the tokens before the last: an engine that can sends them all in one piece.
    """

    id: str
    model: str
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: Sequence[int] = ()
    top_logprobs: int = 0
    routed_experts: bool = False
    sampling_mask: int = 0  # most ids of a token's mask to record; 0: no masks
    session_id: str = ""  # for prefix-cache-friendly routing
    extra: Mapping[str, Any] = field(default_factory=dict)  # penalties, structured output
    stream: bool = True


NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


class SampleChunk(msgspec.Struct, frozen=True, eq=False):
    """The next sampled tokens. (A struct: one is made for every frame, at a sixth of a frozen dataclass's cost.)

    `versions` tile the whole output and come with the last chunk; () there says that the server's own version can't be
    told in rolltap's numbers, None that it gave none. A log-prob that the server could not give as a number is NaN.
    `prompt_ids` is what the engine says it saw, where it says so (first chunk): the proxy compares it. `extras` are
    optional arrays with one row per id of this chunk: `top_ids` and `top_logprobs` [t, k], the sampled token among
    them, and `sampling_mask` [t, k], the ids that it was drawn from where those are not all (-1 fills up); `whole` are
    arrays with one row per id of the whole output, with the last chunk: `routed_experts` int16 [T, layers, k] (SGLang,
    which tells no shape: [T, layers x k]).
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    finish: Literal["stop", "length", "abort"] | None = None
    versions: tuple[VersionSpan, ...] | None = None
    prompt_ids: Sequence[int] | None = None
    extras: Mapping[str, np.ndarray] = NOTHING
    whole: Mapping[str, np.ndarray] = NOTHING


def join_chunks(chunks: Sequence[SampleChunk]) -> SampleChunk:
    """Chunks that came together as one. All of them have log-probs, or none has."""
    if len(chunks) == 1:
        return chunks[0]
    names = {name for chunk in chunks for name in chunk.extras}
    return SampleChunk(
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=None if chunks[0].logprobs is None else [value for chunk in chunks for value in chunk.logprobs or ()],
        finish=next((chunk.finish for chunk in reversed(chunks) if chunk.finish is not None), None),
        versions=next((chunk.versions for chunk in reversed(chunks) if chunk.versions is not None), None),
        prompt_ids=next((chunk.prompt_ids for chunk in chunks if chunk.prompt_ids is not None), None),
        extras={name: np.concatenate([c.extras[name] for c in chunks if name in c.extras]) for name in names},
        whole=next((chunk.whole for chunk in reversed(chunks) if chunk.whole), {}),
    )


Take = Callable[[SampleChunk], Awaitable[bool]]
"""Takes the next chunk; False when no more are wanted."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a server said of itself when it was probed."""

    kind: str
    url: str
    models: tuple[str, ...]
    max_context: int | None
    weight_versions: bool  # every token's version comes with the reply
    weight_updates: bool  # weights can be pushed
    logprobs_mode: Literal["processed", "raw", "unknown"]
    notes: tuple[str, ...] = ()
    structured_output: bool = True  # a JSON schema for the reply is honoured
    states_weights: bool = False  # it says the version that it serves, when asked (`StatesWeights`)


class ServedEngine(Protocol):
    """A server that answers for a policy, whatever it is asked with. What it can't do raises `EngineRefused`."""

    name: str

    async def probe(self) -> EngineFacts:
        """Asks the server what it can do; `EngineUnavailable` if it does not answer."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: str, version: int, adapter: str = "") -> None:
        """Loads a safetensors folder that the server can read, and sets the version of tokens from now on.

        With a name in `adapter` the folder is a peft adapter, which is loaded over the model in place of the former one
        of that name: the model of requests that are to be sampled with it. If that fails, what served serves on.
        """
        ...

    @property
    def receiver(self) -> Receiver | None:
        """What a trainer can send weights to, without a folder; None if there is none."""
        ...

    async def close(self) -> None: ...


class Engine(ServedEngine, Protocol):
    """A server that samples from a policy by token ids."""

    async def sample(self, request: SampleRequest, take: Take) -> None:
        """Samples, and hands the tokens to `take` as they come. Raises an `EngineError` between any two chunks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Ids that are given, none sampled: log-probs are wanted from index `start`, at least 1, on."""

    id: str
    model: str
    token_ids: Sequence[int]
    start: int
    top_logprobs: int = 0


@runtime_checkable
class Scorer(Protocol):
    """An engine that says the log-probs of given ids, at temperature 1 and cut by nothing."""

    async def score(self, request: ScoreRequest) -> TokenScores:
        """One log-prob an id; raises `EngineProtocolError` where the server left one out: none is made up."""
        ...


@runtime_checkable
class StatesWeights(Protocol):
    """A server that can be asked for the version of the weights that it serves."""

    async def served_weights(self) -> int | None:
        """The version; None where the server does not answer now, or gives a name that is no version."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ChatCall:
    """What is asked of a chat upstream (capture mode): the canonical request, with `sampling` as the policy decided."""

    id: str
    model: str
    chat: ChatRequest
    sampling: Sampling
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of the tool call at `position`; its first piece has `id` and `name`."""

    position: int
    arguments: str = ""
    id: str = ""
    name: str = ""


class ChatChunk(msgspec.Struct, frozen=True, eq=False):
    """The next piece of an upstream's reply: what it says, and the tokens behind it.

    `token_ids` and `logprobs` may come later than their text, but all have come with the chunk that has `finish`.
    Where the upstream gives none, `complete` of that chunk is False: the call is text only. `prompt_ids` is what the
    upstream rendered, with the first chunk or the last. `usage` comes with the last chunk.
    """

    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolDelta, ...] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = ()
    finish: Literal["stop", "length", "tool_calls", "abort"] | None = None
    complete: bool = False
    prompt_ids: Sequence[int] | None = None
    usage: Usage | None = None


TakeChat = Callable[[ChatChunk], Awaitable[bool]]


class ChatEngine(ServedEngine, Protocol):
    """A server that renders prompts itself. It can't be told what tokens to continue, only asked which it saw."""

    @property
    def switches_thinking(self) -> bool:
        """Whether it is told to think, or not to."""
        ...

    async def chat(self, call: ChatCall, take: TakeChat) -> None:
        """Hands the reply to `take` as it comes, with the guarantees of `Engine.sample`."""
        ...


def missing_model(model: str, served: Sequence[str]) -> str:
    """What to do about a model that the engine does not serve; empty if it does, or lists no models."""
    if not served or model in served:
        return ""
    return f"set the policy's `model` to one of {', '.join(served)} (an adapter appears with the trainer's first push)"
