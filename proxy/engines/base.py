"""The engine Protocols: token ids in, token ids with log-probs and weight versions out.

An engine client is one file and one line in `rolltap.proxy.engines.registry.ENGINES` (a chat upstream: in
`CHAT_ENGINES`). It does not depend on dialects.

Contract, tested by `tests/contract/test_engine*.py`: chunks arrive in order, and the last one has `finish`. There is
one log-prob per id, or `logprobs` is None; missing values are never filled in. A request that ends early (cancelled, or
`take` returned False) is cancelled on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from rolltap.contract.trainer import TokenScores
from rolltap.errors import EngineRefused
from rolltap.protocols.conversation import ChatRequest, Sampling, Usage
from rolltap.proxy.engines.receivers import Receiver
from rolltap.types import VersionSpan

PauseMode = Literal["keep", "drain", "abort"]


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image of a prompt, as a data URL: ids `[start, end)` stand for it, and `token` where the template wrote it."""

    start: int
    end: int
    url: str
    token: int


@dataclass(frozen=True, slots=True, eq=False)
class SampleRequest:
    """A request to an engine. `prompt_ids` is final: an engine never adds or removes a token. If there are `images`, it
    says with the first tokens which prompt it has.

    Without `stream` nobody reads tokens before the end, so an engine may send all of them in one piece.
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
    origin_id: str = ""  # of a fork: the session that it was forked from
    extra: Mapping[str, Any] = field(default_factory=dict)  # penalties, structured output, a budget of thinking
    stream: bool = True
    images: Sequence[SentImage] = ()


def is_cut(request: SampleRequest) -> bool:
    """Whether top-p, top-k or min-p leave a part of the vocabulary."""
    return request.top_p < 1 or request.top_k > 0 or request.min_p > 0


NOTHING: Mapping[str, np.ndarray] = MappingProxyType({})


class SampleChunk(msgspec.Struct, frozen=True, eq=False):
    """The next sampled tokens. (A struct, as one is made for every event, at a sixth of a frozen dataclass's cost.)

    `versions` come with the last chunk and cover the whole output; () there: the server's version is not a rolltap
    number; None: it returned none. A log-prob that is not a number is NaN. `prompt_ids` (first chunk): the prompt that
    the engine echoes, if it does; the proxy compares it. `extras`: optional arrays with one row per id of this chunk:
    `top_ids` and `top_logprobs` [t, k], including the sampled token, and `sampling_mask` [t, k], the ids that the token
    was drawn from if not all (padded with -1), or `mask_rows` [t], into a table; the table's words of this chunk are
    `mask_table` (`rolltap.token_masks`). `whole`: arrays with one row per id of the whole output, with the last
    chunk: `routed_experts` int16 [T, layers, k] (from SGLang, which sends no shape: [T, layers x k]). `unknown_finish`:
    the server's finish reason if rolltap does not know it; `finish` is "stop" then.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] | None = None
    finish: Literal["stop", "length", "abort"] | None = None
    versions: tuple[VersionSpan, ...] | None = None
    prompt_ids: Sequence[int] | None = None
    extras: Mapping[str, np.ndarray] = NOTHING
    mask_table: np.ndarray | None = None
    whole: Mapping[str, np.ndarray] = NOTHING
    unknown_finish: str = ""


def join_chunks(chunks: Sequence[SampleChunk]) -> SampleChunk:
    """Joins chunks that arrived together. Either all of them have log-probs, or none."""
    if len(chunks) == 1:
        return chunks[0]
    names = {name for chunk in chunks for name in chunk.extras}
    tables = [chunk.mask_table for chunk in chunks if chunk.mask_table is not None]
    return SampleChunk(
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=None if chunks[0].logprobs is None else [value for chunk in chunks for value in chunk.logprobs or ()],
        finish=next((chunk.finish for chunk in reversed(chunks) if chunk.finish is not None), None),
        unknown_finish=next((chunk.unknown_finish for chunk in reversed(chunks) if chunk.unknown_finish), ""),
        versions=next((chunk.versions for chunk in reversed(chunks) if chunk.versions is not None), None),
        prompt_ids=next((chunk.prompt_ids for chunk in chunks if chunk.prompt_ids is not None), None),
        extras={name: np.concatenate([c.extras[name] for c in chunks if name in c.extras]) for name in names},
        mask_table=np.concatenate(tables) if tables else None,
        whole=next((chunk.whole for chunk in reversed(chunks) if chunk.whole), {}),
    )


Take = Callable[[SampleChunk], bool]
"""Takes the next chunk; returns False to end the request. It waits for nothing: it runs inside the engine's read."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """The result of a server's probe."""

    kind: str
    url: str
    models: tuple[str, ...]
    max_context: int | None
    weight_versions: bool  # every token's version comes with the reply
    weight_updates: bool  # weights can be pushed
    logprobs_mode: Literal["processed", "raw", "unknown"]
    notes: tuple[str, ...] = ()
    structured_output: bool = True  # a JSON schema for the reply is honoured
    grammars: bool = False  # it takes grammars that begin behind thinking, and tells the ids that they leave
    states_weights: bool = False  # it says the version that it serves, when asked (`StatesWeights`)
    images: bool = False  # it takes images with a prompt of ids
    budgets: bool = False  # it ends thinking at a request's budget; `ForcedTokens` can tell which tokens it forced


class ServedEngine(Protocol):
    """A model server for a policy, with any API. Unsupported operations raise `EngineRefused`."""

    name: str

    async def probe(self) -> EngineFacts:
        """Asks the server for its features. Raises `EngineUnavailable` if it does not answer."""
        ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def load_weights(self, path: str, version: int, adapter: str = "") -> None:
        """Loads a safetensors folder that the server can read, and sets the version of new tokens.

        With `adapter` the folder is a peft adapter, loaded under this name in place of the previous one; requests use
        the name as their model. If loading fails, the old weights keep serving.
        """
        ...

    @property
    def receiver(self) -> Receiver | None:
        """The receiver for weights without a folder; None if the server has none."""
        ...

    async def close(self) -> None: ...


class FixedWeights:
    """Base of clients whose server cannot change its weights: weight operations raise `EngineRefused`."""

    name: str
    receiver = None
    fixed_because: ClassVar[str]

    async def pause(self, mode: PauseMode) -> None:
        raise self._fixed()

    async def resume(self) -> None:
        raise self._fixed()

    async def load_weights(self, path: str, version: int, adapter: str = "") -> None:
        raise self._fixed()

    def _fixed(self) -> EngineRefused:
        return EngineRefused(f"engine {self.name}: {self.fixed_because}", http_status=501)


class Engine(ServedEngine, Protocol):
    """A server that samples from a policy by token ids."""

    async def sample(self, request: SampleRequest, take: Take) -> None:
        """Samples and passes the tokens to `take` as they arrive. May raise an `EngineError` between any two chunks."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Given ids to score, without sampling: log-probs are computed from index `start` (at least 1) on."""

    id: str
    model: str
    token_ids: Sequence[int]
    start: int
    top_logprobs: int = 0


@runtime_checkable
class Scorer(Protocol):
    """An engine that computes the log-probs of given ids, at temperature 1 and without truncation."""

    async def score(self, request: ScoreRequest) -> TokenScores:
        """One log-prob per id. Raises `EngineProtocolError` if the server left one out."""
        ...


@runtime_checkable
class StatesWeights(Protocol):
    """A server that can be asked for the version of its weights."""

    async def served_weights(self) -> int | None:
        """The version; None if the server does not answer, or returns a name that is not a version."""
        ...


@runtime_checkable
class StatesDigest(Protocol):
    """A server that may state a digest of its weights. Only the embedded engine does."""

    async def weights_digest(self) -> str:
        """The digest (`rolltap.weight_transfer`); empty if the server does not answer, or states none."""
        ...


@runtime_checkable
class Tokenizes(Protocol):
    """A server that can be asked how it tokenizes."""

    async def tokenize(self, text: str, model: str) -> list[int] | None:
        """The ids of `text` without special tokens around it; None if the server has no such route or refuses.

        Raises `EngineError` or `RateLimited` if it does not answer.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ChatCall:
    """A request to a chat upstream (chat mode): the canonical request, with the policy's `sampling`."""

    id: str
    model: str
    chat: ChatRequest
    sampling: Sampling
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of the tool call at `position`; its first piece has `id` and `name`. `extra`: see `ToolCall`."""

    position: int
    arguments: str = ""
    id: str = ""
    name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


class ChatChunk(msgspec.Struct, frozen=True, eq=False):
    """The next piece of an upstream's reply: text and its tokens.

    `token_ids` and `logprobs` may arrive later than their text, at the latest with the chunk that has `finish`. If the
    upstream returns none, `complete` of that chunk is False, and the call is text only. `prompt_ids`: the rendered
    prompt, with the first or the last chunk. `usage` comes with the last chunk. `unknown_finish`: as in `SampleChunk`.
    `nameless_calls` (last chunk): the reply has tool calls whose name never came, which are left out.
    `reasoning_details`: pieces of the blocks that the upstream wants back.
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
    unknown_finish: str = ""
    nameless_calls: bool = False
    reasoning_details: Sequence[dict[str, Any]] = ()


TakeChat = Callable[[ChatChunk], bool]


class ChatEngine(ServedEngine, Protocol):
    """A server that renders prompts itself. It cannot be given prompt tokens, only asked which it used."""

    @property
    def switches_thinking(self) -> bool:
        """Whether requests can switch thinking on and off."""
        ...

    async def chat(self, call: ChatCall, take: TakeChat) -> None:
        """Passes the reply to `take` as it arrives, with the guarantees of `Engine.sample`."""
        ...


def missing_model(model: str, served: Sequence[str]) -> str:
    """Advice for a model that the engine does not serve; empty if it does, or lists no models, or `model` is a path."""
    if not served or model in served or "://" in model:
        return ""
    named = ", ".join(served)
    return f"set the policy's `model` (--model) to one of {named} (an adapter appears with the trainer's first push)"
