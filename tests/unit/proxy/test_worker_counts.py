"""`/metrics` of several workers is one set of counters that never fall."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rolltap.proxy.metrics.calls import CallCounts, Metrics
from rolltap.proxy.metrics.workers import WorkerCounts, remove_counts, summed


def worker(folder: Path, process: int, calls: int, *, open_calls: int = 0) -> tuple[Metrics, WorkerCounts]:
    """What a worker has counted, as the process `process` writes it."""
    metrics = Metrics()
    for _ in range(calls):
        metrics.began("p", None)
        metrics.ended("p", "completed", None, CallCounts(0.0, 10, 5, 3))
    for _ in range(open_calls):
        metrics.began("p", None)
    metrics.scraped, counts = summed(folder, metrics.registry)
    counts._file = folder / str(process)
    counts.write()
    return metrics, counts


def scrape(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(generate_latest(metrics.scraped).decode())
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in families
        for sample in family.samples
    }


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_every_worker_answers_for_all(tmp_path: Path) -> None:
    one, _ = worker(tmp_path, os.getpid(), 3)
    other, _ = worker(tmp_path, os.getppid(), 5, open_calls=2)
    for metrics in (one, other):
        found = scrape(metrics)
        assert found["rolltap_calls_total['completed', 'p']"] == 8
        assert found["rolltap_tokens_total['output', 'p']"] == 24
        assert found["rolltap_call_seconds_count[]"] == 8
        assert found["rolltap_calls_in_flight[]"] == 2


def test_a_dead_workers_counts_stay_without_its_gauges(tmp_path: Path) -> None:
    worker(tmp_path, ended_process(), 5, open_calls=2)
    successor, _ = worker(tmp_path, os.getpid(), 1)
    found = scrape(successor)
    assert found["rolltap_calls_total['completed', 'p']"] == 6
    assert found["rolltap_calls_in_flight[]"] == 0


def test_a_new_server_begins_anew(tmp_path: Path) -> None:
    worker(tmp_path, ended_process(), 5)
    remove_counts(tmp_path)
    metrics, _ = worker(tmp_path, os.getpid(), 1)
    assert scrape(metrics)["rolltap_calls_total['completed', 'p']"] == 1
