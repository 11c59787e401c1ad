"""One set of counters for all processes of `--workers N`.

Each worker writes what it counted, and its state, to a file of its own, once a second where anything changed. `GET
/metrics`, whichever worker answers, sums these files and nothing else, so that its counters never fall. Where a gauge
can't be summed, the worst of the workers' values counts (`WORST`). The file of a worker that died stays and counts on,
without its gauges; a new server removes the files of the one before.
"""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from rolltap.decoding import from_json

WRITE_EVERY_S = 1.0

WORST: Mapping[str, Callable[[float, float], float]] = {
    "rolltap_store_up": min,
    "rolltap_spool_room": min,
    "rolltap_engine_up": min,
    "rolltap_spool_seconds": max,
    "rolltap_stopping": max,
}


class _Family(msgspec.Struct):
    """A metric of one process. `samples`: name, labels and value."""

    name: str
    documentation: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class WorkerCounts(Collector):
    """The sum over all workers that write to `folder`, as a collector."""

    def __init__(self, folder: Path, own: CollectorRegistry) -> None:
        self._folder = folder
        self._own = own
        self._file = folder / str(os.getpid())
        self._written = b""

    async def writing(self, look: Callable[[], Awaitable[None]]) -> None:
        """Writes this process's counts once a second. `look` brings its state up to date."""
        while True:
            await look()
            self.write()
            await asyncio.sleep(WRITE_EVERY_S)

    def write(self) -> None:
        """Writes this process's counts, if they changed."""
        families = [
            _Family(
                metric.name,
                metric.documentation,
                metric.type,
                [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
            )
            for metric in self._own.collect()
        ]
        content = msgspec.json.encode(families)
        if content != self._written:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            new = self._file.with_suffix(".new")
            new.write_bytes(content)
            new.replace(self._file)
            self._written = content

    def collect(self) -> Iterator[Metric]:
        self.write()
        sums: dict[str, tuple[Metric, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
        for file in sorted(self._folder.iterdir()):
            if not file.name.isdecimal():
                continue
            lives = _lives(int(file.name))
            for family in from_json(file.read_bytes(), list[_Family]):
                if family.kind == "gauge" and not lives:
                    continue
                metric = Metric(family.name, family.documentation, family.kind)
                _, values = sums.setdefault(family.name, (metric, {}))
                both = WORST.get(family.name, operator.add)
                for name, labels, value in family.samples:
                    key = (name, tuple(sorted(labels.items())))
                    values[key] = both(values[key], value) if key in values else value
        for metric, values in sums.values():
            for (name, labels), value in values.items():
                metric.add_sample(name, dict(labels), value)
            yield metric


def remove_counts(folder: Path) -> None:
    """Removes what the workers of a former server wrote."""
    with suppress(FileNotFoundError):
        for file in list(folder.iterdir()):
            file.unlink()


def summed(folder: Path, own: CollectorRegistry) -> tuple[CollectorRegistry, WorkerCounts]:
    """A registry with the sum over all workers, and the collector that writes this one's part."""
    registry, counts = CollectorRegistry(), WorkerCounts(folder, own)
    registry.register(counts)
    return registry, counts


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
