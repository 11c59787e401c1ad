"""Counters of what this process has done since it started, for Prometheus.

They are updated as calls pass, never read from the store. The children of labelled metrics are looked up once and
cached: a count on a call's path is a dictionary look-up and an addition under a lock. `workers.py` sums the counters of
several processes.

Durations are histograms of our own: prometheus-client's `Histogram` searches its buckets one by one and takes two
locks. A call observes seven durations: that costs 18 microseconds of CPU there, 3 here (docs/adr/0007). `observe` must
run on the event loop's thread, so it needs no lock; a scrape during an observation may miss that one.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rolltap.contract.trainer import AnnotationLine

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of the buckets of calls' durations, in seconds."""

QUICK_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 30.0, 120.0, 600.0)
"""The same for the stages of a call, most of which take milliseconds."""

disable_created_metrics()

CountedSend = Callable[[Callable[[Any], Any]], Callable[[Any], Any]]
"""Wraps an ASGI `send`."""


class LabelledCounter:
    """A counter that caches its children by their labels."""

    def __init__(self, metric: Counter) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], Counter] = {}

    def __getitem__(self, labels: tuple[str, ...]) -> Counter:
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._metric.labels(*labels)
        return child


@dataclass(frozen=True, slots=True)
class CallCounts:
    """When a call began (seconds since the epoch), and its token counts.

    `cached`: those tokens of the prompt that continue a recorded context. `output`: sampled tokens.
    """

    started_at: float
    prompt: int
    cached: int
    output: int


class Metrics(Collector):
    """Counters of a proxy process, on a registry of its own, and its `state` (`scrape_state.py`)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.state: Collector | None = None  # of the last scrape
        self.scraped = self.registry  # what `/metrics` shows; with several workers their sum
        self._calls = self._counter("rolltap_calls_total", "Model calls that ended.", "policy", "outcome")
        self._tokens = self._counter("rolltap_tokens_total", "Tokens of calls that ended.", "policy", "kind")
        self._scored = self._counter("rolltap_scored_tokens_total", "Tokens of sequences that were scored.", "policy")
        self._fresh = self._counter(
            "rolltap_trainer_tokens_total",
            "Sampled tokens whose log-prob a trainer gave by the weights that sampled them.",
            "policy",
            "harness",
        )
        self._mismatch = self._counter(
            "rolltap_trainer_mismatch_total", "Sum of |log(trainer / engine)| over them.", "policy", "harness"
        )
        self._clipped = self._counter(
            "rolltap_trainer_clipped_total", "Tokens whose gradient the trainer's clip took.", "policy", "harness"
        )
        self._breaks = self._counter("rolltap_breaks_total", "Calls that do not extend a parent.", "policy", "reason")
        self._flaws = self._counter("rolltap_flaws_total", "Calls whose tokens can't be trained.", "policy", "flaw")
        self._ended_late = Counter(
            "rolltap_rollouts_late_total",
            "Rollouts that ended while another proxy could not reach the store, so that calls may be missing.",
            registry=self.registry,
        )
        self._parents_not_read = self._counter(
            "rolltap_parents_not_read_total",
            "Calls that may continue a call of another proxy while the store could not be read: refused, or planned.",
            "policy",
            "result",
        )
        self._pushed_again = self._counter(
            "rolltap_weights_pushed_again_total",
            "Loads of a policy's weights into an engine that had others.",
            "policy",
        )
        self._responses = self._counter("rolltap_http_responses_total", "Replies by plane.", "plane", "status")
        self._undelivered = Counter(
            "rolltap_undelivered_total", "Replies that missed their client.", registry=self.registry
        )
        self._cut = Counter("rolltap_calls_cut_total", "Calls cut by the stop of a server.", registry=self.registry)
        self.stopping = Gauge(
            "rolltap_stopping", "1 while the server waits for its last calls.", registry=self.registry
        )
        self._in_flight = Gauge(
            "rolltap_calls_in_flight", "Calls between intent and completion.", registry=self.registry
        )
        self._seconds = self._durations(
            "rolltap_call_seconds", "From a call's intent to its durable completion.", "", SECONDS
        )
        self._first_token = self._durations(
            "rolltap_first_token_seconds", "From a call's arrival to its first sampled token.", "policy"
        )
        self._stages = self._durations(
            "rolltap_call_stage_seconds",
            "Stages of a call: admit, plan, intent (the store), engine, completion (the store).",
            "stage",
        )
        self.loop_lag = self._durations("rolltap_event_loop_lag_seconds", "How late the event loop woke a timer.", "")

    def collect(self) -> Iterable[Metric]:
        """The families of the state. The registry has the counters."""
        return self.state.collect() if self.state is not None else ()

    def _counter(self, name: str, what: str, *labels: str) -> LabelledCounter:
        return LabelledCounter(Counter(name, what, labels, registry=self.registry))

    def _durations(self, name: str, what: str, label: str, bounds: Sequence[float] = QUICK_SECONDS) -> Durations:
        return Durations(self.registry, name, what, label, bounds)

    def serve(self, policy: str) -> None:
        """Shows a policy's rare counters as 0: `increase` sees no step from an absent series to 1, so an alert would
        miss the first one."""
        for labels in ((policy, "refused"), (policy, "planned")):
            _ = self._parents_not_read[labels]
        _ = self._pushed_again[(policy,)]
        _ = self._calls[policy, "unrecorded"]

    def began(self, policy: str, break_reason: str | None) -> None:
        """Counts a call whose intent was written."""
        self._in_flight.inc()
        if break_reason is not None:
            self._breaks[policy, break_reason].inc()

    def ended(self, policy: str, outcome: str, flaw: str | None, counts: CallCounts) -> None:
        """Counts a call that was completed."""
        self._in_flight.dec()
        self._calls[policy, outcome].inc()
        if flaw is not None:
            self._flaws[policy, flaw].inc()
        self._tokens[policy, "prompt"].inc(counts.prompt)
        self._tokens[policy, "cached"].inc(counts.cached)
        self._tokens[policy, "output"].inc(counts.output)
        self._seconds.observe(time.time() - counts.started_at)

    def scored(self, policy: str, tokens: int) -> None:
        """Counts given ids that were scored for their log-probs. They belong to no call."""
        self._scored[(policy,)].inc(tokens)

    def annotated(self, policy: str, added: Sequence[AnnotationLine]) -> None:
        """Counts a trainer's annotations that were recorded."""
        for line in added:
            self._fresh[policy, line.harness].inc(line.fresh)
            self._mismatch[policy, line.harness].inc(line.fresh_sum)
            self._clipped[policy, line.harness].inc(line.clipped)

    def ended_late(self) -> None:
        self._ended_late.inc()

    def parent_not_read(self, policy: str, *, refused: bool) -> None:
        self._parents_not_read[policy, "refused" if refused else "planned"].inc()

    def cut(self, calls: int) -> None:
        self._cut.inc(calls)

    def pushed_again(self, policy: str) -> None:
        self._pushed_again[(policy,)].inc()

    def undelivered(self, calls: int) -> None:
        self._undelivered.inc(calls)

    def stage(self, name: str, since: float) -> None:
        """Records the duration of a stage that began at `since` (`time.perf_counter`) and ends now."""
        self._stages.observe(time.perf_counter() - since, name)

    def first_token(self, policy: str, seconds: float) -> None:
        self._first_token.observe(seconds, policy)

    def counted(self, plane: str) -> CountedSend:
        """Wraps an ASGI `send` so that the status of each reply of `plane` is counted."""
        responses = self._responses

        def wrap(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def counting(message: Any) -> Any:
                if message["type"] == "http.response.start":
                    responses[plane, str(message["status"])].inc()
                return send(message)

            return counting

        return wrap


def uncounted(send: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replaces `Metrics.counted` where no metrics are kept."""
    return send


class Durations(Collector):
    """One histogram, collected by `registry`. `label` is "" for none; `bounds` are in seconds, ascending."""

    def __init__(self, registry: CollectorRegistry, name: str, what: str, label: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._what = what
        self._labels = (label,) if label else ()
        self._bounds = tuple(bounds)
        self._names = [*map(floatToGoString, self._bounds), "+Inf"]
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        if not label:
            self._add("")
        registry.register(self)

    def observe(self, seconds: float, label: str = "") -> None:
        """Counts one duration under the label's value."""
        if label not in self._counts:
            self._add(label)
        self._counts[label][bisect_left(self._bounds, seconds)] += 1
        self._sums[label] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._what, labels=self._labels)
        for label, counts in list(self._counts.items()):
            buckets = list(zip(self._names, accumulate(counts), strict=True))
            family.add_metric((label,) if self._labels else (), buckets, self._sums[label])
        yield family

    def _add(self, label: str) -> None:
        self._counts[label] = [0] * len(self._names)
        self._sums[label] = 0.0


EVERY_S = 0.5


async def watch_loop(lag: Durations) -> None:
    """Observes the delay of each timer, forever: whatever blocks the event loop delays every call."""
    while True:
        due = time.perf_counter() + EVERY_S
        await asyncio.sleep(EVERY_S)
        lag.observe(max(0.0, time.perf_counter() - due))
