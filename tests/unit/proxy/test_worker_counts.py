"""`/metrics` of several workers is one set of counters that never fall."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rolltap.calllog.facts import LogCondition
from rolltap.proxy.metrics.calls import CallCounts, Metrics
from rolltap.proxy.metrics.scrape_state import ProcessState
from rolltap.proxy.metrics.workers import WorkerCounts, remove_counts, summed


def worker(
    folder: Path, process: int, calls: int, *, open_calls: int = 0, state: ProcessState | None = None
) -> tuple[Metrics, WorkerCounts]:
    """What a worker has counted, as the process `process` writes it."""
    metrics = Metrics()
    metrics.state = state
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


def state(*, refused: int, spool_s: float, used: int) -> ProcessState:
    condition = LogCondition(store=not spool_s, spool=True, spool_s=spool_s)
    engines = {"main": not spool_s}
    return ProcessState(condition, refused, refused, 0, (used, 8), 0, engines)


def test_a_workers_own_state_is_in_every_scrape(tmp_path: Path) -> None:
    """One has lost its store and its engine, the other is well."""
    one, _ = worker(tmp_path, os.getpid(), 0, state=state(refused=0, spool_s=0.0, used=1))
    other, _ = worker(tmp_path, os.getppid(), 0, state=state(refused=3, spool_s=40.0, used=2))
    worker(tmp_path, ended_process(), 0, state=state(refused=2, spool_s=90.0, used=4))
    for metrics in (one, other):
        found = scrape(metrics)
        assert found["rolltap_facts_refused_total[]"] == 5
        assert (found["rolltap_store_up[]"], found["rolltap_engine_up['main']"]) == (0, 0)
        assert found["rolltap_spool_seconds[]"] == 40
        assert (found["rolltap_store_connections_used[]"], found["rolltap_store_connections_most[]"]) == (3, 16)


def test_a_new_server_begins_anew(tmp_path: Path) -> None:
    worker(tmp_path, ended_process(), 5)
    remove_counts(tmp_path)
    metrics, _ = worker(tmp_path, os.getpid(), 1)
    assert scrape(metrics)["rolltap_calls_total['completed', 'p']"] == 1
