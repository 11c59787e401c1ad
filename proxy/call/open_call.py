"""A call on its way from its intent to its completion, and what was sampled of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.proxy.conversation.chat import Choice, Usage
from rolltap.proxy.engines.base import ChatCall, ChatChunk, SampleChunk, SampleRequest
from rolltap.proxy.metrics.calls import CallCounts
from rolltap.types import Flaw, Float32, VersionSpan

SENT = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
"""The fields of a `SampleRequest` that are recorded as what was sent."""


@dataclass(slots=True, eq=False)
class SampledTokens:
    """What an engine has sampled of one call so far: ids and log-probs, [T] each."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    missing: bool = False  # a chunk came without log-probs
    first_at: float = 0.0  # when the first chunk came (`time.perf_counter`)
    versions: tuple[VersionSpan, ...] | None = None
    extras: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def take(self, chunk: SampleChunk, end: int) -> None:
        """Adds a chunk's tokens up to the `end`-th of the whole output: a stop string may end it earlier."""
        self.first_at = self.first_at or time.perf_counter()
        size = min(len(chunk.token_ids), end - len(self.ids))
        self.ids += chunk.token_ids[:size]
        self._add_logprobs(chunk.logprobs, size)
        if chunk.versions is not None:
            self.versions = _until(chunk.versions, len(self.ids))
        for name, array in chunk.extras.items():
            self.extras.setdefault(name, []).append(array[:size])
        for name, array in chunk.whole.items():
            self.extras[name] = [array[: len(self.ids)]]

    def take_chat(self, chunk: ChatChunk) -> None:
        """Adds the tokens behind a chat upstream's chunk."""
        self.first_at = self.first_at or time.perf_counter()
        self.ids += chunk.token_ids
        self._add_logprobs(chunk.logprobs, len(chunk.token_ids))

    def _add_logprobs(self, logprobs: Sequence[float] | None, size: int) -> None:
        if logprobs is None:
            self.missing = self.missing or size > 0
        else:
            self.logprobs += logprobs[:size]

    def end_at(self, size: int) -> None:
        """Keeps the first `size` tokens: a stop string was found only when the reply was whole."""
        if size >= len(self.ids):
            return
        del self.ids[size:], self.logprobs[size:]
        self.versions = self.versions and _until(self.versions, size)
        self.extras = {name: [np.concatenate(arrays)[:size]] for name, arrays in self.extras.items()}

    def clear(self) -> None:
        """Drops the tokens: not all of them came, so what is left of the call is its text."""
        self.ids, self.logprobs, self.missing = [], [], False

    def of_version(self, version: int) -> None:
        """Marks all tokens as sampled from weights `version`."""
        self.versions = (VersionSpan(version, 0, len(self.ids)),) if self.ids else ()

    def aligned(self) -> dict[str, np.ndarray]:
        """The optional arrays, [T, ...] each; one that the engine did not give for every token is left out."""
        whole = {name: np.concatenate(arrays) for name, arrays in self.extras.items()}
        return {name: array for name, array in whole.items() if len(array) == len(self.ids)}

    def flaw(self, logprobs: Float32) -> Flaw | None:
        """Why these tokens, whose log-probs are `logprobs` [T], can't be trained, if they can't."""
        if self.missing or len(logprobs) != len(self.ids):
            return Flaw.LOGPROBS_MISSING
        if not np.isfinite(logprobs).all():
            return Flaw.LOGPROBS_NOT_FINITE
        if self.versions is None and self.ids:
            return Flaw.VERSION_UNKNOWN
        return None


def _until(versions: Sequence[VersionSpan], end: int) -> tuple[VersionSpan, ...]:
    """The spans up to the `end`-th token."""
    cut = [VersionSpan(span.version, span.start, min(span.end, end)) for span in versions]
    return tuple(span for span in cut if span.start < span.end)


@dataclass(slots=True, eq=False)
class OpenCall:
    """One choice of a request under way. Its source fills in what the engine, upstream or vendor answers."""

    id: str
    index: int  # 0-based among the request's choices
    node: CallNode
    plan: PromptPlan
    sent: SampleRequest | ChatCall
    prompt: Sequence[int]  # what the engine sees; empty while an upstream has not told
    started_at: float = field(default_factory=time.time)
    version: int | None = None  # of the policy, when the call began; None: not known
    refused: bool = False  # the store did not take the intent
    whole: bool = False  # the reply has ended: nothing of it is missing
    sampled: SampledTokens = field(default_factory=SampledTokens)
    choice: Choice | None = None
    usage: Usage | None = None  # as the upstream counts
    reasoning_tokens: int = 0
    flaw: Flaw | None = None
    problem: str = ""  # why the reply, which its client gets all the same, is no completed call
    withheld: bytes = b""  # the end of a relayed reply, which waits for the record

    @property
    def begun(self) -> bool:
        """Whether the store has the intent."""
        return self.node.recorded

    def see_prompt(self, plan: PromptPlan) -> None:
        """Takes the plan that holds the prompt which an upstream says it rendered."""
        self.plan, self.prompt = plan, plan.prompt_ids.tolist()
        self.node.prompt_ids, self.node.shared = plan.prompt_ids, plan.shared

    def sampling_sent(self) -> dict[str, Any]:
        """The sampling that was asked of the engine, as it is recorded."""
        if isinstance(self.sent, ChatCall):
            return {"model": self.sent.model, **msgspec.to_builtins(self.sent.sampling)}
        return {name: getattr(self.sent, name) for name in SENT} | dict(self.sent.extra)

    def tokens(self) -> int:
        """Of prompt and output; as the upstream counts where rolltap sees no tokens."""
        if self.usage is not None and not self.sampled.ids:
            return self.usage.prompt + self.usage.output
        return len(self.prompt) + len(self.sampled.ids)

    def counts(self) -> CallCounts:
        """What the metrics count of the call."""
        return CallCounts(self.started_at, len(self.prompt), self.plan.shared, len(self.sampled.ids))
