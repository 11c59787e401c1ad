"""A call between its intent and its completion, and the tokens sampled for it so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from rolltap.calllog.facts import CallRow, until
from rolltap.images import file_of
from rolltap.protocols.conversation import Choice, Usage
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.proxy.engines.base import ChatCall, ChatChunk, SampleChunk, SampleRequest
from rolltap.proxy.metrics.calls import CallCounts
from rolltap.token_masks import MASK_ROWS, MASK_TABLE, per_token
from rolltap.types import Flaw, Float32, VersionSpan

SENT = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")
"""The fields of a `SampleRequest` that are recorded in `sampling_sent`."""


@dataclass(slots=True, eq=False)
class SampledTokens:
    """The ids and log-probs, [T] each, that an engine has sampled for one call so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    missing: bool = False  # a chunk came without log-probs
    unknown: bool = False  # some ids are not the tokenizer's
    first_at: float = 0.0  # when the first chunk came (`time.perf_counter`)
    versions: tuple[VersionSpan, ...] | None = None
    extras: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def take(self, chunk: SampleChunk, end: int) -> None:
        """Adds a chunk's tokens, up to token `end` of the whole output: a stop string may end it inside the chunk."""
        self.first_at = self.first_at or time.perf_counter()
        size = min(len(chunk.token_ids), end - len(self.ids))
        self.ids += chunk.token_ids[:size]
        self._add_logprobs(chunk.logprobs, size)
        if chunk.versions is not None:
            self.versions = until(chunk.versions, len(self.ids))
        if chunk.extras:
            for name, array in chunk.extras.items():
                self.extras.setdefault(name, []).append(array[:size])
        if chunk.mask_table is not None:
            self.extras.setdefault(MASK_TABLE, []).append(chunk.mask_table)
        if chunk.whole:
            for name, array in chunk.whole.items():
                self.extras[name] = [array[: len(self.ids)]]

    def take_chat(self, chunk: ChatChunk) -> None:
        """Adds the tokens of a chat upstream's chunk."""
        self.first_at = self.first_at or time.perf_counter()
        self.ids += chunk.token_ids
        self._add_logprobs(chunk.logprobs, len(chunk.token_ids))

    def _add_logprobs(self, logprobs: Sequence[float] | None, size: int) -> None:
        if logprobs is None:
            self.missing = self.missing or size > 0
        else:
            self.logprobs += logprobs[:size]

    def truncate(self, size: int) -> None:
        """Keeps the first `size` tokens. Used if a stop string is found only when the reply is complete."""
        if size >= len(self.ids):
            return
        del self.ids[size:], self.logprobs[size:]
        self.versions = self.versions and until(self.versions, size)
        whole = {name: np.concatenate(arrays) for name, arrays in self.extras.items()}
        self.extras = {name: [array] for name, array in per_token(whole, lambda _, array: array[:size]).items()}

    def clear(self) -> None:
        """Drops the tokens. Used if the upstream did not return all of them: the call keeps only its text."""
        self.ids, self.logprobs, self.missing = [], [], False

    def set_version(self, version: int) -> None:
        """Marks all tokens as sampled from weight version `version`."""
        self.versions = (VersionSpan(version, 0, len(self.ids)),) if self.ids else ()

    def aligned(self) -> dict[str, np.ndarray]:
        """The optional arrays, [T, ...] each, and the masks' table. One that does not cover every token is left out."""
        whole = {name: np.concatenate(arrays) for name, arrays in self.extras.items()}
        table = whole.pop(MASK_TABLE, np.empty(0, np.int32))
        aligned = {name: array for name, array in whole.items() if len(array) == len(self.ids)}
        return {**aligned, MASK_TABLE: table} if MASK_ROWS in aligned else aligned

    def flaw(self, logprobs: Float32) -> Flaw | None:
        """The reason why these tokens, with log-probs `logprobs` [T], cannot be trained; None if they can.

        Unknown ids come first: such tokens are no context either, and who samples them often has broken log-probs.
        """
        if self.unknown:
            return Flaw.IDS_UNKNOWN
        if self.missing or len(logprobs) != len(self.ids):
            return Flaw.LOGPROBS_MISSING
        if not np.isfinite(logprobs).all():
            return Flaw.LOGPROBS_NOT_FINITE
        if self.versions is None and self.ids:
            return Flaw.VERSION_UNKNOWN
        return None


@dataclass(slots=True, eq=False)
class OpenCall:
    """One choice of a request in flight. Its source fills in the reply of the engine, upstream or vendor."""

    id: str
    index: int  # 0-based among the request's choices
    node: CallNode
    plan: PromptPlan
    sent: SampleRequest | ChatCall
    prompt: Sequence[int]  # the prompt ids that the engine sees; empty until a chat upstream reports them
    started_at: float = field(default_factory=time.time)
    recorded: CallRow | None = None  # the recorded call that answers it, in a session that is replayed
    version: int | None = None  # the policy's weight version when the call began; None: not known
    intent_rejected: bool = False  # by the store
    complete: bool = False  # the reply is complete
    sampled: SampledTokens = field(default_factory=SampledTokens)
    choice: Choice | None = None
    usage: Usage | None = None  # token counts that the upstream reports
    reasoning_tokens: int = 0
    flaw: Flaw | None = None
    image_urls: Mapping[str, str] = field(default_factory=dict)  # of the prompt's images, by `PromptImage.digest`
    masked: tuple[tuple[int, int], ...] = ()  # spans of the sampled tokens that the session's rules leave without loss
    unknown_finish: str = ""  # the engine's reason for the end, if rolltap does not know it
    problem: str = ""  # why the call is an engine error although its client gets the reply
    withheld: bytes = b""  # the end of a relayed reply, sent after the call is recorded

    def set_plan(self, plan: PromptPlan) -> None:
        """Replaces the plan by one with the prompt that the upstream reports."""
        self.plan, self.prompt = plan, plan.prompt_ids.tolist()
        self.node.prompt_ids, self.node.shared = plan.prompt_ids, plan.shared
        self.node.break_, self.node.injected, self.node.images = plan.break_, plan.injected, plan.images

    def new_images(self) -> tuple[bytes, ...]:
        """The files of the images that the parent's prompt has not."""
        added = (image for image in self.plan.images if image.start >= self.plan.shared)
        return tuple(file_of(self.image_urls[image.digest]) for image in added)

    @property
    def under_grammar(self) -> bool:
        """Whether an engine with a token API is sent a grammar or a schema."""
        return isinstance(self.sent, SampleRequest) and not {"grammar", "json_schema"}.isdisjoint(self.sent.extra)

    def sampling_sent(self) -> dict[str, Any]:
        """The sampling parameters sent to the engine, in their recorded form: of a grammar, which the request's tools
        make and many calls repeat, a digest."""
        if isinstance(self.sent, ChatCall):
            return {"model": self.sent.model, **msgspec.to_builtins(self.sent.sampling)}
        sent = {name: getattr(self.sent, name) for name in SENT} | dict(self.sent.extra)
        if (grammar := self.sent.extra.get("grammar")) is not None:
            sent["grammar"] = blake2b(grammar.encode(), digest_size=16).hexdigest()
        return sent

    def tokens(self) -> int:
        """The number of prompt and output tokens. The upstream's count is used if rolltap sees no tokens."""
        if self.usage is not None and not self.sampled.ids:
            return self.usage.prompt + self.usage.output
        return len(self.prompt) + len(self.sampled.ids)

    def counts(self) -> CallCounts:
        """The call's figures for the metrics."""
        return CallCounts(self.started_at, len(self.prompt), self.plan.shared, len(self.sampled.ids))
