"""Histograms of durations, by one label; the event loop's lag.

prometheus-client's own `Histogram` searches its buckets one by one and takes two locks. A call observes seven
durations: that costs 18 microseconds of CPU there, 3 here (docs/adr/0007). `observe` must run on the event loop's
thread, so it needs no lock; a scrape during an observation may miss that one.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


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
