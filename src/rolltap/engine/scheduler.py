"""The engine loop: one thread that batches requests, samples one token per step, and swaps weights between steps.

Requests are computed in slots. A free slot keeps the tokens of its last request. A new request takes the free slot that
shares the longest prefix with it, and computes only the rest.

Invariants
- Everything that touches the model or the cache runs in the loop's thread. Other threads only post to its queue.
- A token's log-prob comes from the weights whose version it carries, over exactly the tokens before it. After a reload,
  active requests compute their context again under the new weights before they go on.
- A request ends exactly once: its last `TokenDelta` has `finish`, which is `error` if the loop itself failed.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from rolltap.engine.grammar import GrammarFailed
from rolltap.engine.model import CausalModel, SlotCache, read_weights
from rolltap.engine.sampling import (
    ActiveRequest,
    FinishReason,
    Outbox,
    PromptScores,
    SamplingRequest,
    TokenDelta,
    constrained,
    draw_tokens,
    processed_logprobs,
    sampling_mask,
    sampling_words,
)
from rolltap.errors import ConfigError, EngineUnavailable
from rolltap.weight_transfer import digest_of_tensors


class EngineSlots:
    """Tokens and key-value cache of `slots` sequences of at most `context` tokens. For one thread."""

    def __init__(self, model: CausalModel, slots: int, context: int) -> None:
        self.count = slots
        self._model = model
        self._context = context
        self._cache = SlotCache(model.layers, slots, context)
        self._tokens = np.zeros((slots, context + 1), dtype=np.int64)
        self._cached = np.zeros(slots, dtype=np.int64)  # how many tokens of a free slot the cache holds

    def take(self, prompt_ids: Sequence[int], max_tokens: int, busy: Collection[int]) -> tuple[int, int]:
        """Puts a prompt into the best slot that is not in `busy`: the slot, and how many of its tokens are cached."""
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        slot, shared = self._best_slot(prompt, busy)
        self._tokens[slot, : len(prompt)] = prompt
        self._cache.grow(min(len(prompt) + max_tokens, self._context))
        return slot, shared

    def append(self, slot: int, position: int, token: int) -> None:
        """Puts a sampled token behind the others; it is computed by the next forward pass."""
        self._tokens[slot, position] = token

    def release(self, slot: int, cached: int) -> None:
        """Frees a slot whose first `cached` tokens a later request may reuse."""
        self._cached[slot] = cached

    def forget(self) -> None:
        """Marks all free slots as empty: the weights that they were computed with are gone."""
        self._cached[:] = 0

    def prefill(self, requests: Sequence[ActiveRequest], lengths: list[int]) -> None:
        """Caches the next `lengths` pending tokens of each request."""
        slots = torch.tensor([active.slot for active in requests])
        self._model.extend(self._place(requests, lengths, slots[:, None], slots), self._cache)

    def next_logits(self, requests: Sequence[ActiveRequest]) -> tuple[Tensor, list[Tensor] | None]:
        """Of the one pending token of each request: the logits [B,V] behind it, and in a mixture the experts [layers,k]
        that it went through.

        A contiguous view of the cache is free, a gathered copy is not. So this computes all slots up to the last one
        in use and drops the rows of unused slots.
        """
        width = max(active.slot for active in requests) + 1
        by_slot = {active.slot: active for active in requests}
        rows = [by_slot.get(slot) for slot in range(width)]
        lengths = [int(row is not None) for row in rows]
        ids = self._place(rows, lengths, torch.arange(width)[:, None], slice(0, width))
        places = [active.slot for active in requests]
        logits_BV = self._model.logits(ids, self._cache)[places, 0]
        experts_BTLk = self._model.experts(width)
        return logits_BV, None if experts_BTLk is None else [experts_BTLk[slot, 0] for slot in places]

    def _best_slot(self, prompt: np.ndarray, busy: Collection[int]) -> tuple[int, int]:
        """The free slot that shares the longest prefix with `prompt`, and the length of that prefix."""
        free = np.array([slot for slot in range(self.count) if slot not in busy])
        usable = len(prompt) - 1  # the last token is always computed: its logits are needed
        differs = self._tokens[free, :usable] != prompt[:usable]
        shared = np.where(differs.any(1), differs.argmax(1), usable) if usable else np.zeros(len(free), dtype=np.int64)
        shared = np.minimum(shared, self._cached[free])
        best = int(shared.argmax())
        return int(free[best]), int(shared[best])

    def _place(
        self, rows: Sequence[ActiveRequest | None], lengths: list[int], slots: Tensor, view: slice | Tensor
    ) -> Tensor:
        """The ids [B,T] of the next `lengths` pending tokens of each row, where the cache is set to. None: padding."""
        steps = torch.arange(max(lengths))[None]
        starts = torch.tensor([active.cached if active else 0 for active in rows])[:, None]
        counts = torch.tensor(lengths)[:, None]
        positions = torch.where(steps < counts, starts + steps, 0)
        columns = torch.where(steps < counts, starts + steps, self._cache.columns_held)
        ids = torch.from_numpy(self._tokens)[slots, positions]
        width = int(positions.max()) + 1
        device = self._model.device
        self._cache.place(slots.to(device), view, positions.to(device), columns.to(device), width)
        return ids.to(device)


log = logging.getLogger(__name__)
T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
PREFILL_TOKENS = 4096
"""Prompt tokens computed per step at most, so that a long prompt does not delay the requests that are sampling."""


class EngineLoop:
    """Samples for many requests from one model. `deliver` gets the deltas of each step, in the loop's thread."""

    def __init__(
        self,
        model: CausalModel,
        eos_ids: frozenset[int],
        deliver: Callable[[Outbox], None],
        slots: int = 32,
        context: int | None = None,
    ) -> None:
        self.model = model
        if not (context or model.longest):
            raise ConfigError("the model's configuration has no max_position_embeddings: set --context")
        self.context = min(context or model.longest, model.longest or context or 0)
        self.version = "default"
        self.digest = ""  # of the weights that were loaded last; empty: those of the start
        self.counts: Counter[str] = Counter()
        self.failure: Exception | None = None
        self._eos_ids = eos_ids
        self._deliver = deliver
        self._slots = EngineSlots(model, slots, self.context)
        self._waiting: deque[SamplingRequest] = deque()
        self._active: dict[int, ActiveRequest] = {}  # by slot
        self._outbox: Outbox = []
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pause: PauseMode | None = None
        self._drain_waiters: list[Future[None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)

    # Called from other threads

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the loop after the current step; unfinished requests end with `abort`."""
        self._call(self._stop)
        self._thread.join()

    def submit(self, requests: Sequence[SamplingRequest]) -> Future[None]:
        """Queues requests. Fails with `EngineUnavailable` if the loop has failed."""
        return self._call(lambda: self._waiting.extend(requests))

    def score(self, ids: Sequence[int], top: int) -> Future[PromptScores]:
        """The log-probs of given ids at temperature 1, by a forward pass of its own between two steps."""
        return self._call(lambda: self._score(ids, top))

    def abort(self, ids: Sequence[str] | None) -> Future[int]:
        """Ends the requests `ids` (None: all) with the tokens they have; the result is how many there were."""
        return self._call(lambda: self._abort(None if ids is None else frozenset(ids)))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stops sampling. `abort` ends active requests, `keep` freezes them, `wait` completes once they have ended."""
        paused: Future[None] = Future()
        self._inbox.put(lambda: self._start_pause(mode, paused))
        return paused

    def resume(self) -> Future[None]:
        return self._call(self._end_pause)

    def reload(self, folder: Path) -> Future[None]:
        """Loads weights between two steps. `ConfigError` if they can't be used: the current ones stay."""
        return self._call(lambda: self._replace_weights(read_weights(folder), str(folder)))

    def replace(self, weights: Mapping[str, Tensor], source: str, version: str | None) -> Future[None]:
        """Like `reload`, with tensors from `source` (for messages). A `version` names the weights from then on."""

        def replace_and_name() -> None:
            self._replace_weights(weights, source)
            self.version = version or self.version

        return self._call(replace_and_name)

    def set_version(self, version: str) -> Future[None]:
        """Names the current weights, from the next step on."""
        return self._call(lambda: setattr(self, "version", version))

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def load(self) -> tuple[int, int]:
        """How many requests are active, and how many wait."""
        return len(self._active), len(self._waiting)

    def _call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the loop's thread between two steps."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
                result.set_exception(error)

        if self.failure is not None:
            result.set_exception(EngineUnavailable(f"the engine's loop failed: {self.failure!r}; restart the engine"))
        else:
            self._inbox.put(run)
        return result

    # The loop's thread

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._handle_inbox()
                    self._admit()
                    self._step()
                    self._flush()
        except Exception as error:
            log.exception("the engine's loop failed")
            self.failure = error
            self._end_all("error")
        self._flush()

    def _handle_inbox(self) -> None:
        """Runs what other threads posted; blocks for the next post if there is nothing to sample."""
        idle = (not self._active and not self._waiting) or self._pause in ("keep", "abort")
        if self._pause == "wait" and not self._active:
            self._complete_drain_waiters()
            idle = True
        try:
            while True:
                self._inbox.get(block=idle)()
                idle = False
        except Empty:
            return

    def _stop(self) -> None:
        self._closing = True
        self._end_all("abort")

    def _start_pause(self, mode: PauseMode, paused: Future[None]) -> None:
        self._pause = mode
        if mode == "wait":
            self._drain_waiters.append(paused)
            return
        if mode == "abort":
            self._end_all("abort")
        self._flush()
        paused.set_result(None)

    def _end_pause(self) -> None:
        self._pause = None
        self._complete_drain_waiters()

    def _complete_drain_waiters(self) -> None:
        for waiter in self._drain_waiters:
            waiter.set_result(None)
        self._drain_waiters.clear()

    def _replace_weights(self, weights: Mapping[str, Tensor], source: str) -> None:
        digest = digest_of_tensors(weights)
        self.model.replace_weights(weights, source)
        self.digest = digest
        self._slots.forget()
        for active in self._active.values():
            active.cached = 0
        self.counts["weight_reloads"] += 1

    def _abort(self, ids: frozenset[str] | None) -> int:
        active = [item for item in self._active.values() if ids is None or item.request.id in ids]
        for item in active:
            self._end(item, "abort")
        waiting = [request for request in self._waiting if ids is None or request.id in ids]
        for request in waiting:
            self._waiting.remove(request)
            self._outbox.append((request.sink, TokenDelta(finish="abort")))
        return len(active) + len(waiting)

    def _end_all(self, finish: FinishReason) -> None:
        for active in list(self._active.values()):
            self._end(active, finish)
        while self._waiting:
            self._outbox.append((self._waiting.popleft().sink, TokenDelta(finish=finish)))

    def _end(self, active: ActiveRequest, finish: FinishReason, stop_reason: int | None = None) -> None:
        del self._active[active.slot]
        self._slots.release(active.slot, active.cached)
        self.counts[f"finished:{finish}"] += 1
        self._outbox.append((active.request.sink, active.take_delta(finish, stop_reason)))

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._deliver(outbox)

    def _admit(self) -> None:
        """Gives free slots to waiting requests, first come first served."""
        while self._waiting and self._pause is None and len(self._active) < self._slots.count:
            request = self._waiting.popleft()
            prompt, sampling = request.prompt_ids, request.sampling
            slot, shared = self._slots.take(prompt, sampling.max_tokens, self._active)
            rng = random.Random(sampling.seed)
            self._active[slot] = ActiveRequest(request, slot, len(prompt), cached=shared, reused=shared, rng=rng)
            self.counts["prompt_tokens"] += len(prompt)
            self.counts["prefix_hits"] += shared

    def _score(self, ids: Sequence[int], top: int) -> PromptScores:
        logprobs: list[float] = []
        tops: list[tuple[tuple[int, float], ...]] = []
        for logits_TV in self.model.score(ids[:-1]):
            logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
            targets = torch.tensor(ids[len(logprobs) + 1 : len(logprobs) + 1 + len(logits_TV)], device=logits_TV.device)
            logprobs += logprobs_TV.gather(1, targets[:, None])[:, 0].tolist()
            tops += [_top(row_V, top) for row_V in logprobs_TV] if top else [()] * len(logits_TV)
        self.counts["scored_tokens"] += len(ids)
        return PromptScores(tuple(ids[1:]), tuple(logprobs), tuple(tops))

    def _step(self) -> None:
        """Computes pending prompts, then samples one token for every request that is ready."""
        if self._pause in ("keep", "abort") or not self._active:
            return
        behind = [active for active in self._active.values() if active.pending > 1]
        if behind:
            self._prefill(behind)
        ready = [active for active in list(self._active.values()) if active.pending == 1 and self._constrain(active)]
        if ready:
            self._sample(ready)

    def _constrain(self, active: ActiveRequest) -> bool:
        """Sets what the request's grammar leaves for the next token; False if that failed, which ends the request."""
        if active.request.grammar is None:
            return True
        try:
            active.allowed = active.request.grammar.words()
        except GrammarFailed as error:
            log.warning("request %s: its grammar failed after %d tokens: %s", active.request.id, len(active.ids), error)
            self._end(active, "abort")
            return False
        return True

    def _prefill(self, behind: list[ActiveRequest]) -> None:
        """Caches all but the last token of prompts, as many as `PREFILL_TOKENS` (padding counts) allows."""
        admitted: list[ActiveRequest] = []
        width = 0
        for active in sorted(behind, key=lambda item: item.pending):
            pending = min(active.pending - 1, PREFILL_TOKENS)
            if admitted and pending * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            admitted.append(active)
            width = pending
        lengths = [min(active.pending - 1, width) for active in admitted]
        self._slots.prefill(admitted, lengths)
        for active, length in zip(admitted, lengths, strict=True):
            active.cached += length

    def _sample(self, ready: list[ActiveRequest]) -> None:
        """Samples the next token of each request in `ready`, by one forward pass."""
        logits_BV, experts = self._slots.next_logits(ready)
        samplings = [active.request.sampling for active in ready]
        logprobs_BV = processed_logprobs(constrained(logits_BV, [active.allowed for active in ready]), samplings)
        ids_B = draw_tokens(logprobs_BV, samplings, [active.rng.random() for active in ready])
        chosen_B = logprobs_BV.gather(1, ids_B[:, None])[:, 0]
        for row, (active, token, logprob) in enumerate(zip(ready, ids_B.tolist(), chosen_B.tolist(), strict=True)):
            active.cached += 1
            if samplings[row].top_logprobs:
                active.tops.append(_top(logprobs_BV[row], samplings[row].top_logprobs))
            if active.request.grammar is not None:
                active.take_mask(
                    token, sampling_words(logprobs_BV[row]) if samplings[row].truncates else active.allowed
                )
            elif samplings[row].has_mask:
                active.masks.append(sampling_mask(logprobs_BV[row]))
            if experts is not None:
                active.experts.append(experts[row])
            self._append(active, token, logprob)
        self.counts["generation_tokens"] += len(ready)

    def _append(self, active: ActiveRequest, token: int, logprob: float) -> None:
        """Appends a sampled token, and ends the request if this was its last one."""
        active.ids.append(token)
        active.logprobs.append(logprob)
        active.of_version(self.version)
        self._slots.append(active.slot, active.length, token)
        active.length += 1
        sampling = active.request.sampling
        if token in sampling.stop_ids:
            self._end(active, "stop", token)
        elif (token in self._eos_ids and not sampling.ignore_eos) or sampling.stops(active.ids):
            self._end(active, "stop")
        elif len(active.ids) >= sampling.max_tokens or active.length >= self.context:
            self._end(active, "length")
        elif active.request.stream:
            self._outbox.append((active.request.sink, active.take_delta()))


def _top(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    values, ids = logprobs_V.topk(count)
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
