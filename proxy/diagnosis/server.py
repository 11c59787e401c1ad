"""Everything that `GET /diagnosis` finds: the store, its other proxies, Redis, the machine, engines, and what waits."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

from rolltap import __version__
from rolltap.calllog.stats import postgres_facts, redis_problem, writer_facts
from rolltap.contract.admin import Diagnosis, Finding
from rolltap.errors import RolltapError
from rolltap.proxy.call.policies import Policy
from rolltap.proxy.diagnosis.machine import descriptors, honesty_of, room_at
from rolltap.proxy.planes.services import Services
from rolltap.settings import hide_password
from rolltap.tenants import EVERY_TENANT, acting_for
from rolltap.types import GroupStatus

ANSWERS_WITHIN_S = 5.0
FOR_COMMANDS = 10
"""Connections to Postgres that are to be left for commands."""

Examine = Callable[[], Awaitable[Sequence[Finding]]]


class ServerDiagnosis:
    """The examinations of one server."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._settings = services.settings

    async def run(self) -> Diagnosis:
        examinations: dict[str, Examine] = {
            "store": self._store,
            "proxies": self._proxies,
            "connections": self._connections,
            "Redis": self._redis,
            "machine": self._machine,
            "policies": self._policies,
            "queue": self._queue,
        }
        found = await asyncio.gather(*(_within(what, examine) for what, examine in examinations.items()))
        names = tuple(self._services.policies.names)
        return Diagnosis(
            __version__, os.getpid(), socket.gethostname(), names, [each for some in found for each in some]
        )

    async def _store(self) -> list[Finding]:
        log = self._services.call_log
        condition = await log.condition()
        name = hide_password(self._settings.store_url)
        findings = [Finding("store", name)]
        if not condition.store:
            state = f"{name}: away; {'calls go to the spool' if condition.spool else 'calls are refused'}"
            findings = [Finding("store", state, "bring the database back; the log says what it answers", healthy=False)]
        if condition.clock_is_off:
            state = f"{condition.clock_ahead_s:+.1f} s ahead of the store's"
            findings.append(Finding("clock", state, "set this machine's clock (NTP)", healthy=False))
        if condition.spool is False:
            advice = "calls are refused until it has drained; store.spool_mb bridges longer outages"
            findings.append(Finding("spool", "full", advice, healthy=False))
        waiting = getattr(log, "waiting", 0)
        findings.append(Finding("facts outside the store", str(waiting)))
        return findings

    async def _proxies(self) -> list[Finding]:
        if self._services.call_log.database.dialect_name == "sqlite":
            return []
        writers = await writer_facts(self._services.call_log.database)
        behind = f", {writers.behind} with calls outside the store" if writers.behind else ""
        advice = "the ends of rollouts wait for them (queue.spool_wait_s), then say `late`" if writers.behind else ""
        differences = await self._services.peers.look()
        return [
            Finding("proxies and workers on this store", f"{writers.count}{behind}", advice),
            *(Finding("other proxies", what, remedy, healthy=False) for what, remedy in differences.items()),
        ]

    async def _connections(self) -> list[Finding]:
        database = self._services.call_log.database
        if database.dialect_name == "sqlite":
            return []
        facts, writers = await postgres_facts(database), await writer_facts(database)
        most = self._settings.store.connections * writers.count
        state = f"{facts.open} open, {facts.usable} allowed; {writers.count} proxies may open {most}"
        findings = [Finding("Postgres", facts.version)]
        if not facts.is_durable:
            advice = "fsync or full_page_writes is off: a loss of power loses acknowledged calls"
            findings = [Finding("Postgres", facts.version, advice, healthy=False)]
        if most + FOR_COMMANDS > facts.usable:
            fair = max(6, (facts.usable - FOR_COMMANDS) // writers.count)
            advice = f"raise max_connections (or the role's limit), or set store.connections = {fair}"
            return [*findings, Finding("connections", state, advice, healthy=False)]
        return [*findings, Finding("connections", state)]

    async def _redis(self) -> list[Finding]:
        if not self._settings.store.ingest:
            return []
        state, problem = await redis_problem(self._settings.store.ingest)
        return [Finding("Redis", state, problem, healthy=not problem)]

    async def _machine(self) -> list[Finding]:
        data = self._settings.data
        return [
            descriptors(),
            await asyncio.to_thread(honesty_of, data),
            room_at("room for the spool and the index", data),
        ]

    async def _policies(self) -> list[Finding]:
        findings: list[Finding] = []
        for policy in self._services.policies.all:
            with acting_for(policy.settings.tenant):
                state = await self._services.ledger.policies.get(policy.name)
            findings.append(_policy(policy, state.version, state.paused))
        return findings or [Finding("policies", "none", "add [policies.NAME] to the settings", healthy=False)]

    async def _queue(self) -> list[Finding]:
        """What waits, and for what."""
        ledger = self._services.ledger
        findings: list[Finding] = []
        with acting_for(EVERY_TENANT):
            counts = await ledger.counts()
        if counts.queued:
            state = f"{counts.queued} tasks queued, {counts.nodes} nodes"
            findings.append(
                Finding("tasks", state, "" if counts.nodes else "no node asks for work: start `rolltap node`")
            )
        for policy in self._services.policies.all:
            with acting_for(policy.settings.tenant):
                stats = await ledger.policies.stats(policy.name)
            ready = stats.groups.get(GroupStatus.COMPLETE, 0)
            leases = counts.leases.get(policy.name, 0)
            if stats.room == 0:
                advice = "no new group is opened until its trainers have taken some"
                findings.append(Finding(f"groups of {policy.name}", f"{ready} ready, {leases} leases open", advice))
            elif dead := stats.groups.get(GroupStatus.DEAD, 0):
                advice = "trainers refused them too often: rolltap dead-letters"
                findings.append(Finding(f"groups of {policy.name}", f"{dead} dead", advice))
        return findings


def _policy(policy: Policy, version: int, paused: str | None) -> Finding:
    what, state = f"policy {policy.name}", f"version {version} on {policy.engine.name}"
    if not policy.up:
        return Finding(what, f"{state}: does not answer", "start the engine, or correct engines.*.url", healthy=False)
    for problem in (policy.wrong_tokenizer, policy.wrong_weights):
        if problem:
            return Finding(what, f"{state}: calls are refused", problem, healthy=False)
    if policy.lacks_model:
        advice = "the engine does not list its model: correct policies.*.model, or push the adapter"
        return Finding(what, state, advice, healthy=policy.owned)
    if paused:
        return Finding(what, f"{state}: paused ({paused})", "a trainer changes its weights; it goes on after that")
    return Finding(what, state)


async def _within(what: str, examine: Examine) -> Sequence[Finding]:
    """The findings, or one that says why there are none."""
    try:
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            return await examine()
    except (RolltapError, OSError, TimeoutError) as error:
        return [Finding(what, "not known", str(error) or f"no answer within {ANSWERS_WITHIN_S:g} s", healthy=False)]
