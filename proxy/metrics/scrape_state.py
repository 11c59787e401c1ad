"""The state at a scrape, for Prometheus: `ProcessState` of this process, `StoreState` of what all processes share.

The ledger is read at most every `KEPT_S` seconds, however often Prometheus scrapes. While it does not answer, its
series are absent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rolltap.calllog.facts import LogCondition
from rolltap.errors import RolltapError
from rolltap.ledger.ledger import LedgerCounts
from rolltap.ledger.policies import PolicyStats
from rolltap.proxy.call.policy import Policy
from rolltap.proxy.engines.pool import EnginePool
from rolltap.proxy.planes.services import Services
from rolltap.tenants import EVERY_TENANT, acting_for

KEPT_S = 10.0
ANSWERS_WITHIN_S = 5.0

Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True, slots=True)
class FromLedger:
    """The ledger's counts: by policy, and those that belong to no policy."""

    policies: Mapping[str, PolicyStats]
    totals: LedgerCounts


@dataclass(frozen=True, slots=True, eq=False)
class ProcessState(Collector):
    """What a process has and sees for itself. Workers differ in it."""

    condition: LogCondition
    waiting: int
    refused: int
    written_again: int
    connections: tuple[int, int] | None
    forged: int
    engines: Mapping[str, bool]

    def collect(self) -> Iterator[Family]:
        yield _gauge("rolltap_store_up", "1 where the store answers and takes what is written.", self.condition.store)
        if self.condition.spool is not None:
            yield _gauge("rolltap_spool_room", "1 where the spool has room for a new call.", self.condition.spool)
            what = "Seconds for which facts have gone to the spool, or waited in it; 0 where it is empty."
            yield _gauge("rolltap_spool_seconds", what, self.condition.spool_s)
        if self.connections is not None:
            used, most = self.connections
            yield _gauge("rolltap_store_connections_used", "Connections to Postgres in use.", used)
            yield _gauge("rolltap_store_connections_most", "Connections to Postgres that this process may open.", most)
        refused = CounterMetricFamily("rolltap_facts_refused_total", "Acknowledged facts that the store refused.")
        refused.add_metric([], self.refused)
        yield refused
        what = "Acknowledged facts that a promoted Postgres lacked, and got from this process' memory."
        again = CounterMetricFamily("rolltap_facts_written_again_total", what)
        again.add_metric([], self.written_again)
        yield again
        yield _gauge("rolltap_facts_waiting", "Facts in the spool or the stream, not in the store yet.", self.waiting)
        forged = CounterMetricFamily("rolltap_forged_handles_total", "Handles that another secret signed.")
        forged.add_metric([], self.forged)
        yield forged
        yield _gauge_by("rolltap_engine_up", "1 where the engine or replica serves.", "engine", self.engines)


@dataclass(frozen=True, slots=True, eq=False)
class StoreState(Collector):
    """What is the same for all processes of a machine. `ledger` is None while the ledger does not answer."""

    clock_ahead_s: float
    differences: int
    versions: Mapping[str, int]
    ledger: FromLedger | None

    def collect(self) -> Iterator[Family]:
        yield _gauge("rolltap_clock_ahead_seconds", "How far this clock is ahead of the store's.", self.clock_ahead_s)
        yield _gauge(
            "rolltap_proxies_differ",
            "Things that another proxy of the store has otherwise: keys, policies.",
            self.differences,
        )
        yield _gauge_by("rolltap_policy_version", "Weights that are sampled from.", "policy", self.versions)
        if self.ledger is not None:
            yield from _ledger_families(self.ledger)


def registry_of(state: Collector) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(state)
    return registry


class StateCollector:
    """Collects the current state of a server's parts."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._ledger_lock = asyncio.Lock()
        self._ledger_cache: tuple[float, FromLedger | None] = (float("-inf"), None)

    async def of_process(self) -> ProcessState:
        services = self._services
        return ProcessState(
            condition=await services.call_log.condition(),
            waiting=getattr(services.call_log, "waiting", 0),
            refused=services.call_log.refused,
            written_again=services.call_log.written_again,
            connections=services.call_log.database.connections,
            forged=services.handles.forged,
            engines={name: up for policy in services.policies.all for name, up in engines_up(policy)},
        )

    async def of_store(self) -> StoreState:
        services = self._services
        policies = services.policies.all
        async with self._ledger_lock:
            read_at, ledger = self._ledger_cache
            if time.monotonic() > read_at + KEPT_S:
                ledger = await self._read_ledger(policies)
                self._ledger_cache = (time.monotonic(), ledger)
        return StoreState(
            clock_ahead_s=services.call_log.database.clock_ahead_s,
            differences=len(services.peers.differences),
            versions={policy.name: policy.version for policy in policies},
            ledger=ledger,
        )

    async def _read_ledger(self, policies: Sequence[Policy]) -> FromLedger | None:
        ledger = self._services.ledger
        try:
            async with asyncio.timeout(ANSWERS_WITHIN_S):
                counts: dict[str, PolicyStats] = {}
                for policy in policies:  # excludes a former tenant's rows under the same policy name
                    with acting_for(policy.settings.tenant):
                        counts[policy.name] = await ledger.policies.stats(policy.name)
                with acting_for(EVERY_TENANT):
                    return FromLedger(counts, await ledger.counts())
        except (RolltapError, TimeoutError):
            return None


def engines_up(policy: Policy) -> list[tuple[str, bool]]:
    """Returns the engine, or each replica of a pool, and whether it serves as far as is known."""
    if isinstance(policy.engine, EnginePool):
        return [(replica.engine.name, policy.up and not replica.ejected) for replica in policy.engine.replicas]
    return [(policy.engine.name, policy.up)]


def _ledger_families(ledger_state: FromLedger) -> Iterator[Family]:
    yield _gauge("rolltap_tasks_queued", "Submitted tasks that wait for a node.", ledger_state.totals.queued)
    yield _gauge("rolltap_nodes", "Nodes that asked for work within the last minute.", ledger_state.totals.nodes)
    yield _gauge_by("rolltap_leases_open", "Leases that trainers hold.", "policy", ledger_state.totals.leases)
    groups = GaugeMetricFamily("rolltap_groups", "Groups by status.", labels=["policy", "status"])
    rollouts = GaugeMetricFamily("rolltap_rollouts", "Rollouts by status.", labels=["policy", "status"])
    ready = GaugeMetricFamily(
        "rolltap_ready_groups", "Complete groups by how many updates they are behind.", labels=["policy", "staleness"]
    )
    for name, counts in ledger_state.policies.items():
        for status, count in counts.groups.items():
            groups.add_metric([name, status], count)
        for status, count in counts.rollouts.items():
            rollouts.add_metric([name, status], count)
        for staleness, count in counts.staleness.items():
            ready.add_metric([name, str(staleness)], count)
        if counts.abandoned:
            ready.add_metric([name, "abandoned"], counts.abandoned)
    yield from (groups, rollouts, ready)
    rooms = {name: counts.room for name, counts in ledger_state.policies.items() if counts.room is not None}
    yield _gauge_by("rolltap_group_room", "Groups that may still be opened before trainers catch up.", "policy", rooms)
    zero_variance = {name: counts.zero_variance for name, counts in ledger_state.policies.items()}
    yield _gauge_by("rolltap_zero_variance_groups", "Groups whose rewards are all equal.", "policy", zero_variance)
    untrained = {name: counts.untrained for name, counts in ledger_state.policies.items()}
    yield _gauge_by("rolltap_untrained_groups", "Groups dropped because no reply carries loss.", "policy", untrained)
    unanswered = {name: counts.unanswered for name, counts in ledger_state.policies.items()}
    yield _gauge_by("rolltap_unanswered_rollouts", "Rollouts in which nothing was sampled.", "policy", unanswered)


def _gauge(name: str, what: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, what, value=float(value))


def _gauge_by(name: str, what: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family
