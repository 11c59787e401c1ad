"""Sampling: what the engine loop is asked for; from logits to a token and the log-probability it was drawn with; and
what is sent back.

The log-prob of a token is that of exactly the distribution it was drawn from: temperature first, then top-k, top-p
and min-p with what is left normalised (vLLM's `processed_logprobs`). With no truncation asked for it is
`log_softmax(logits / temperature)`. Greedy sampling (temperature 0) reports the log-probs at temperature 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rolltap.engine.grammar import GrammarState
from rolltap.token_masks import FREE, Int32

LOGPROBS_MODE = "processed_logprobs"

Stops = Callable[[Sequence[int]], bool]
"""Whether a request ends after these sampled ids. It is called after each token, in the engine's thread."""


def never(ids: Sequence[int]) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How one request is sampled. `top_k` 0 is off; `stop_ids` are in addition to the model's own end tokens."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int = 0
    stops: Stops = never

    @property
    def has_mask(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary that a trainer can take again; greedy ones are not."""
        return self.truncates and self.temperature > 0.0

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def processed_logprobs(logits_BV: Tensor, samplings: Sequence[SamplingOptions]) -> Tensor:
    """The log-probs [B,V] that each row is drawn from, -inf where truncated."""
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=logits_BV.device)
    logprobs_BV = torch.log_softmax(logits_BV / temperatures[:, None], dim=-1)
    for row, sampling in enumerate(samplings):
        if sampling.truncates:
            logprobs_BV[row] = _truncate(logprobs_BV[row], sampling)
    return logprobs_BV


def constrained(logits_BV: Tensor, allowed: Sequence[Int32 | None]) -> Tensor:
    """The logits [B,V], -inf for the ids that are not in a row's bitmap; None: all are."""
    for row, words in enumerate(allowed):
        if words is not None:
            bits = np.unpackbits(words.view(np.uint8), count=logits_BV.shape[-1], bitorder="little")
            excluded_V = torch.from_numpy(bits == 0).to(logits_BV.device)
            logits_BV[row] = logits_BV[row].masked_fill(excluded_V, -torch.inf)
    return logits_BV


def draw_tokens(logprobs_BV: Tensor, samplings: Sequence[SamplingOptions], uniforms: Sequence[float]) -> Tensor:
    """One token id a row [B], by inverting the cumulative distribution at `uniforms` in [0, 1).

    A row depends on its own uniform only, so a seeded request does not depend on its neighbours in the batch.
    """
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    targets_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_BV.device)[:, None] * cumulative_BV[:, -1:]
    ids_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0]
    greedy_B = torch.tensor([sampling.temperature == 0.0 for sampling in samplings], device=logprobs_BV.device)
    return torch.where(greedy_B, logprobs_BV.argmax(-1), ids_B)


def sampling_mask(logprobs_V: Tensor) -> tuple[int, ...]:
    """The ids that a row of `processed_logprobs` can be drawn from."""
    return tuple(torch.isfinite(logprobs_V).nonzero()[:, 0].tolist())


def sampling_words(logprobs_V: Tensor) -> Int32:
    """The same ids as a bitmap [ceil(V / 32)]."""
    bits = torch.isfinite(logprobs_V).cpu().numpy()
    packed = np.packbits(np.pad(bits, (0, -len(bits) % 32)), bitorder="little")
    return packed.view("<i4").astype(np.int32)


def _truncate(logprobs_V: Tensor, sampling: SamplingOptions) -> Tensor:
    """Keeps what all of top-k, top-p and min-p keep, normalised; always at least the likeliest token."""
    ordered_V, order_V = logprobs_V.sort(descending=True)
    probabilities_V = ordered_V.exp()
    keep_V = torch.ones_like(order_V, dtype=torch.bool)
    if sampling.top_k > 0:
        keep_V[sampling.top_k :] = False
    if sampling.top_p < 1.0:
        keep_V &= probabilities_V.cumsum(-1) - probabilities_V < sampling.top_p
    if sampling.min_p > 0.0:
        keep_V &= probabilities_V >= sampling.min_p * probabilities_V[0]
    keep_V[0] = True
    masked_V = torch.full_like(logprobs_V, -torch.inf)
    masked_V[order_V[keep_V]] = ordered_V[keep_V]
    return torch.log_softmax(masked_V, dim=-1)


NO_WORDS: Int32 = np.empty(0, np.int32)
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class EngineVersionSpan:
    """Output tokens `[start, end)` were sampled from the weights that the engine calls `version`. The proxy records it
    as a `VersionSpan`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The log-probs of a prompt's ids but the first, and the likeliest candidates of each as (id, log-prob)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next sampled tokens of a request.

    `logprobs` has one value per id. `tops` has the likeliest candidates of each id as (id, log-prob), if they were
    asked for, and `masks` the ids that it was drawn from, if those are not all; with a grammar `mask_rows` and the new
    words of the table (`rolltap.token_masks`). `spans` tile the output so far, from
    its first token; the last delta has `finish`, and of a mixture the experts [T, layers, k] of the sampling passes.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    masks: tuple[tuple[int, ...], ...] = ()
    finish: FinishReason | None = None
    stop_reason: int | None = None
    spans: tuple[EngineVersionSpan, ...] = ()
    cached_tokens: int = 0
    experts: Tensor | None = None
    mask_rows: tuple[int, ...] = ()
    mask_table: Int32 = field(default_factory=lambda: NO_WORDS)

    def __add__(self, later: TokenDelta) -> TokenDelta:
        return TokenDelta(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.tops + later.tops,
            self.masks + later.masks,
            later.finish,
            later.stop_reason,
            later.spans,
            max(self.cached_tokens, later.cached_tokens),
            later.experts,
            self.mask_rows + later.mask_rows,
            np.concatenate([self.mask_table, later.mask_table]),
        )


Sink = Callable[[TokenDelta], None]
Outbox = list[tuple[Sink, TokenDelta]]
"""The deltas of one step, each with the sink that it is for."""


def deliver(outbox: Outbox) -> None:
    """Gives each delta to its sink."""
    for sink, delta in outbox:
        sink(delta)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRequest:
    """What to sample and where to send it: a delta per step with `stream`, else one delta with everything."""

    id: str
    prompt_ids: Sequence[int]
    sampling: SamplingOptions
    sink: Sink
    stream: bool = True
    grammar: GrammarState | None = None


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in a slot. Of its `length` tokens (prompt and output) the cache holds the first `cached`.

    `reused` is the number of prompt tokens that the slot already held when the request took it.
    """

    request: SamplingRequest
    slot: int
    length: int
    cached: int
    reused: int
    rng: random.Random
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    masks: list[tuple[int, ...]] = field(default_factory=list)
    mask_rows: list[int] = field(default_factory=list)
    spans: list[EngineVersionSpan] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    allowed: Int32 | None = None  # what the grammar leaves for the next token, as a bitmap; None: all ids
    sent: int = 0

    @property
    def pending(self) -> int:
        """How many tokens still have to be computed before the next one can be sampled, the last one included."""
        return self.length - self.cached

    def of_version(self, version: str) -> None:
        """Notes the weights that the last token was sampled from."""
        count = len(self.ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = EngineVersionSpan(version, self.spans[-1].start, count)
        else:
            self.spans.append(EngineVersionSpan(version, count - 1, count))

    def take_mask(self, token: int, words: Int32 | None) -> None:
        """Notes the ids that `token` was drawn from, and takes the grammar on by it."""
        grammar = self.request.grammar
        assert grammar is not None
        if not grammar.writer.full:
            self.mask_rows.append(FREE if words is None else grammar.writer.add(words))
        grammar.take(token)

    def take_delta(self, finish: FinishReason | None = None, stop_reason: int | None = None) -> TokenDelta:
        """The tokens sampled since the last call."""
        start, self.sent = self.sent, len(self.ids)
        grammar = self.request.grammar
        return TokenDelta(
            tuple(self.ids[start:]),
            tuple(self.logprobs[start:]),
            tuple(self.tops[start:]),
            tuple(self.masks[start:]),
            finish,
            stop_reason,
            tuple(self.spans),
            self.reused,
            torch.stack(self.experts) if finish and self.experts else None,
            tuple(self.mask_rows[start:]),
            NO_WORDS if grammar is None else grammar.writer.take(),
        )
