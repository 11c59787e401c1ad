"""The engine's loop: one thread that batches requests, samples a token a step, and changes weights between steps.

Invariants
- Everything that touches the model or the cache runs in the loop's thread; other threads only post to its queue.
- A sampled token's log-prob comes from the weights whose version it carries, over exactly the tokens before it: after
  a reload, requests in flight recompute their context under the new weights before they go on.
- A request ends exactly once, with `finish` on its last `Delta`, or with `error` if the loop itself failed.
- A free slot keeps the tokens it last held; a new request takes the free slot that shares the longest prefix with it
  and computes only the rest.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from rolltap.engine.model import CachePlan, KeyValueCache, Qwen3, read_weights
from rolltap.engine.sampling import Sampling, draw, process
from rolltap.errors import EngineUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")
Finish = Literal["stop", "length", "abort", "error"]
PauseMode = Literal["abort", "wait", "keep"]
PREFILL_TOKENS = 4096
"""Prompt tokens computed a step at most, so that a long prompt does not hold up those being sampled."""


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens `[start, end)` were sampled from the weights named `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Delta:
    """The next sampled tokens of a request. `spans` count from the first output token and come with `finish`.

    `tops` holds each token's likeliest alternatives as (id, log-prob), where asked for.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()
    finish: Finish | None = None
    stop_reason: int | None = None
    spans: tuple[Span, ...] = ()
    cached_tokens: int = 0

    def __add__(self, later: Delta) -> Delta:
        return Delta(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            self.tops + later.tops,
            later.finish,
            later.stop_reason,
            later.spans,
            max(self.cached_tokens, later.cached_tokens),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What to sample, and where to send it. With `stream`, a `Delta` a step; else one with everything at the end."""

    id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    sink: Callable[[Delta], None]
    stream: bool = True


@dataclass(slots=True, eq=False)
class Running:
    """A request in a slot. Of its `length` tokens the cache holds the first `cached`."""

    request: Request
    slot: int
    length: int
    cached: int
    rng: random.Random
    reused: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    sent: int = 0

    @property
    def pending(self) -> int:
        return self.length - self.cached

    def take(self, finish: Finish | None, stop_reason: int | None = None) -> Delta:
        """What was sampled since the last take."""
        start, self.sent = self.sent, len(self.ids)
        return Delta(
            tuple(self.ids[start:]),
            tuple(self.logprobs[start:]),
            tuple(self.tops[start:]),
            finish,
            stop_reason,
            tuple(_spans(self.versions)) if finish else (),
            self.reused,
        )


def _spans(versions: Sequence[str]) -> list[Span]:
    edges = [i for i in range(len(versions)) if i == 0 or versions[i] != versions[i - 1]]
    return [Span(versions[a], a, b) for a, b in zip(edges, [*edges[1:], len(versions)], strict=True)]


class EngineLoop:
    """Serves requests on one model. `deliver` gets each step's deltas with their sinks, in the loop's thread."""

    def __init__(
        self,
        model: Qwen3,
        eos_ids: frozenset[int],
        deliver: Callable[[list[tuple[Callable[[Delta], None], Delta]]], None],
        slots: int = 32,
        context: int | None = None,
    ) -> None:
        self.model = model
        self.context = min(context or model.config.max_position_embeddings, model.config.max_position_embeddings)
        self.version = "default"
        self.counts: Counter[str] = Counter()
        self.failure: Exception | None = None
        self._eos_ids = eos_ids
        self._deliver = deliver
        self._cache = KeyValueCache(model.config, slots, self.context)
        self._tokens = np.zeros((slots, self.context + 1), dtype=np.int64)
        self._held = np.zeros(slots, dtype=np.int64)  # how many of a slot's tokens the cache holds
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Running] = {}  # by slot
        self._outbox: list[tuple[Callable[[Delta], None], Delta]] = []
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pause: PauseMode | None = None
        self._drained: list[Future[None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="engine-loop", daemon=True)

    # Called from other threads

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the loop after the step under way; what is in flight ends with `abort`."""
        self._call(self._stop)
        self._thread.join()

    def submit(self, requests: Sequence[Request]) -> Future[None]:
        """Queues requests. Fails with `EngineUnavailable` if the loop has."""
        return self._call(lambda: self._waiting.extend(requests))

    def abort(self, ids: Sequence[str] | None) -> Future[int]:
        """Ends requests (all of them for None) with what they have; how many there were."""
        return self._call(lambda: self._abort(None if ids is None else frozenset(ids)))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stops sampling. `abort` ends what runs, `keep` freezes it, `wait` lets it finish (the future waits too)."""
        done: Future[None] = Future()
        self._inbox.put(lambda: self._start_pause(mode, done))
        return done

    def resume(self) -> Future[None]:
        return self._call(self._end_pause)

    def reload(self, folder: Path) -> Future[None]:
        """Loads weights between two steps. `ConfigError` if they can't be used: the old ones go on."""
        return self._call(lambda: self._renew(read_weights(folder), str(folder)))

    def replace(self, weights: Mapping[str, Tensor], source: str, version: str | None) -> Future[None]:
        """As `reload`, by weights that came from `source`; tokens are of `version` from then on, if there is one."""

        def work() -> None:
            self._renew(weights, source)
            self.version = version or self.version

        return self._call(work)

    def set_version(self, version: str) -> Future[None]:
        """Names the weights that tokens come from, from the next step on."""
        return self._call(lambda: setattr(self, "version", version))

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def load(self) -> tuple[int, int]:
        """How many requests run and wait."""
        return len(self._running), len(self._waiting)

    def _call(self, work: Callable[[], T]) -> Future[T]:
        """Runs `work` in the loop's thread between steps."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - handed to the caller, who raises it
                done.set_exception(error)

        if self.failure is not None:
            done.set_exception(EngineUnavailable(f"the engine's loop failed: {self.failure!r}; restart it"))
        else:
            self._inbox.put(run)
        return done

    # The loop's thread

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._listen()
                    self._admit()
                    self._step()
                    self._flush()
        except Exception as error:
            log.exception("the engine's loop failed")
            self.failure = error
            self._end_all("error")
        self._flush()

    def _listen(self) -> None:
        """Does what was posted; waits for a post if there is nothing else to do."""
        idle = (not self._running and not self._waiting) or self._pause in ("keep", "abort")
        if self._pause == "wait" and not self._running:
            for done in self._drained:
                done.set_result(None)
            self._drained.clear()
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

    def _start_pause(self, mode: PauseMode, done: Future[None]) -> None:
        self._pause = mode
        if mode == "wait":
            self._drained.append(done)
            return
        if mode == "abort":
            self._end_all("abort")
        self._flush()
        done.set_result(None)

    def _end_pause(self) -> None:
        self._pause = None
        for done in self._drained:
            done.set_result(None)
        self._drained.clear()

    def _renew(self, weights: Mapping[str, Tensor], source: str) -> None:
        self.model.replace_weights(weights, source)
        self._held[:] = 0
        for running in self._running.values():
            running.cached = 0
        self.counts["weight_reloads"] += 1

    def _abort(self, ids: frozenset[str] | None) -> int:
        running = [r for r in self._running.values() if ids is None or r.request.id in ids]
        for item in running:
            self._end(item, "abort")
        waiting = [r for r in self._waiting if ids is None or r.id in ids]
        for request in waiting:
            self._waiting.remove(request)
            self._outbox.append((request.sink, Delta(finish="abort")))
        return len(running) + len(waiting)

    def _end_all(self, finish: Finish) -> None:
        for running in list(self._running.values()):
            self._end(running, finish)
        while self._waiting:
            self._outbox.append((self._waiting.popleft().sink, Delta(finish=finish)))

    def _end(self, running: Running, finish: Finish, stop_reason: int | None = None) -> None:
        del self._running[running.slot]
        self._held[running.slot] = running.cached
        self.counts[f"finished:{finish}"] += 1
        self._outbox.append((running.request.sink, running.take(finish, stop_reason)))

    def _flush(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._deliver(outbox)

    def _admit(self) -> None:
        """Gives free slots to waiting requests, first come first served."""
        while self._waiting and self._pause is None and len(self._running) < len(self._held):
            request = self._waiting.popleft()
            prompt = np.asarray(request.prompt_ids, dtype=np.int64)
            slot, shared = self._best_slot(prompt)
            self._tokens[slot, : len(prompt)] = prompt
            self._running[slot] = Running(
                request, slot, len(prompt), shared, random.Random(request.sampling.seed), shared
            )
            self._cache.grow(min(len(prompt) + request.sampling.max_tokens, self.context))
            self.counts["prompt_tokens"] += len(prompt)
            self.counts["prefix_hits"] += shared

    def _best_slot(self, prompt: np.ndarray) -> tuple[int, int]:
        """The free slot that shares the longest prefix with `prompt`, and how long it is.

        At least the last prompt token is left to compute: its logits are needed.
        """
        free = np.array([slot for slot in range(len(self._held)) if slot not in self._running])
        usable = len(prompt) - 1
        differs = self._tokens[free, :usable] != prompt[:usable]
        shared = np.where(differs.any(1), differs.argmax(1), usable) if usable else np.zeros(len(free), dtype=np.int64)
        shared = np.minimum(shared, self._held[free])
        best = int(shared.argmax())
        return int(free[best]), int(shared[best])

    def _step(self) -> None:
        """Computes pending prompts, then samples one token for every request that is ready."""
        if self._pause in ("keep", "abort") or not self._running:
            return
        behind = [running for running in self._running.values() if running.pending > 1]
        if behind:
            self._prefill(behind)
        ready = [running for running in self._running.values() if running.pending == 1]
        if ready:
            self._decode(ready)

    def _prefill(self, behind: list[Running]) -> None:
        """Caches all but the last token of prompts, as many as the step's budget of padded tokens allows."""
        chosen: list[Running] = []
        width = 0
        for running in sorted(behind, key=lambda item: item.pending):
            wanted = min(running.pending - 1, PREFILL_TOKENS)
            if chosen and wanted * (len(chosen) + 1) > PREFILL_TOKENS:
                break
            chosen.append(running)
            width = wanted
        lengths = [min(running.pending - 1, width) for running in chosen]
        slots = torch.tensor([running.slot for running in chosen])
        self._forward(chosen, lengths, slots[:, None], slots)
        for running, length in zip(chosen, lengths, strict=True):
            running.cached += length

    def _decode(self, ready: list[Running]) -> None:
        """Samples the next token of each request in `ready` by one forward over the slots up to the last in use.

        A contiguous view of the cache costs nothing, so unused slots in between are computed and thrown away.
        """
        last = max(running.slot for running in ready) + 1
        by_slot = {running.slot: running for running in ready}
        rows: list[Running | None] = [by_slot.get(slot) for slot in range(last)]
        slots = torch.arange(last)
        hidden = self._forward(rows, [int(row is not None) for row in rows], slots[:, None], slice(0, last))
        logits = self.model.lm_head(hidden[[running.slot for running in ready], 0])
        samplings = [running.request.sampling for running in ready]
        logprobs = process(logits, samplings)
        ids = draw(logprobs, samplings, [running.rng.random() for running in ready])
        chosen = logprobs.gather(1, ids[:, None])[:, 0]
        for row, (running, token, logprob) in enumerate(zip(ready, ids.tolist(), chosen.tolist(), strict=True)):
            running.cached += 1
            if running.request.sampling.top_logprobs:
                running.tops.append(_top(logprobs[row], running.request.sampling.top_logprobs))
            self._accept(running, token, logprob)
        self.counts["generation_tokens"] += len(ready)

    def _accept(self, running: Running, token: int, logprob: float) -> None:
        """Appends a sampled token and ends the request if it was the last."""
        running.ids.append(token)
        running.logprobs.append(logprob)
        running.versions.append(self.version)
        self._tokens[running.slot, running.length] = token
        running.length += 1
        sampling = running.request.sampling
        if token in sampling.stop_ids:
            self._end(running, "stop", token)
        elif token in self._eos_ids and not sampling.ignore_eos:
            self._end(running, "stop")
        elif len(running.ids) >= sampling.max_tokens or running.length >= self.context:
            self._end(running, "length")
        elif running.request.stream:
            self._outbox.append((running.request.sink, running.take(None)))

    def _forward(
        self, rows: Sequence[Running | None], lengths: list[int], slots: Tensor, view: slice | Tensor
    ) -> Tensor:
        """Hidden states [B,T,hidden] of the next `lengths` pending tokens of each row; None rows are padding."""
        steps = torch.arange(max(lengths))[None]
        starts = torch.tensor([running.cached if running else 0 for running in rows])[:, None]
        counts = torch.tensor(lengths)[:, None]
        positions = torch.where(steps < counts, starts + steps, 0)
        columns = torch.where(steps < counts, starts + steps, self._cache.bin)
        ids = torch.from_numpy(self._tokens)[slots, positions]
        width = int(positions.max()) + 1
        return self.model.hidden(ids, CachePlan(self._cache, slots, view, positions, columns, width))


def _top(logprobs_V: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    values, ids = logprobs_V.topk(count)
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
