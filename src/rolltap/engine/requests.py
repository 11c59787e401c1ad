"""What the engine loop is asked to sample, and what it sends back."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rolltap.engine.grammar import GrammarState
from rolltap.engine.sampling import SamplingOptions
from rolltap.token_masks import FREE, Int32

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
