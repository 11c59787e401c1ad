"""The server's state: probes without a key, its metrics and its diagnosis.

`/health`: is this process running? `/ready`: can it accept a new call? It is 200 or 503 and reports the state of each
part, without addresses or names: `store` (ok, away), `spool` (ok, full, none) and `engines` (up, down). `models`
(served, missing; unknown while an engine is down) does not affect the status, because an adapter appears only with the
trainer's first push. While the store is unavailable, a proxy with room in its spool is ready: otherwise all proxies of
one Postgres would be taken out of service at once although each can continue. A server that was told to stop is 503
with the status `stopping`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rolltap.contract.admin import Diagnosis
from rolltap.proxy.call.policy import Policy
from rolltap.proxy.diagnosis import ServerDiagnosis
from rolltap.proxy.metrics.scrape_state import StateCollector, engines_up, registry_of
from rolltap.proxy.planes.answers import Alive, Readiness, content_of
from rolltap.proxy.planes.router import PlaneRouter, answer
from rolltap.proxy.planes.services import Services

SPOOL: dict[bool | None, Literal["ok", "full", "none"]] = {None: "none", True: "ok", False: "full"}


def router(services: Services) -> PlaneRouter:
    routes = PlaneRouter()

    @routes.get("/health")
    async def health() -> Alive:
        return Alive()

    @routes.get("/ready", responses={503: answer("no new call could be taken", Readiness)}, response_model=Readiness)
    async def ready() -> Response:
        condition = await services.call_log.condition()
        engines = all(any(up for _, up in engines_up(policy)) for policy in services.policies.all)
        takes_calls = condition.takes_calls and engines and not services.stopping
        state = Readiness(
            status="stopping" if services.stopping else "ready" if takes_calls else "not ready",
            store="ok" if condition.store else "away",
            spool=SPOOL[condition.spool],
            engines="up" if engines else "down",
            models=_models(services.policies.all),
            weights="wrong" if any(policy.wrong_weights for policy in services.policies.all) else "right",
            tokenizers="differ" if any(policy.wrong_tokenizer for policy in services.policies.all) else "same",
            clock="off" if condition.clock_is_off else "ok",
            proxies="differ" if services.peers.differences else "same",
        )
        return Response(msgspec.json.encode(state), 200 if takes_calls else 503, media_type="application/json")

    return routes


def _models(policies: Sequence[Policy]) -> Literal["served", "missing", "unknown"]:
    """Whether the engines list the policies' models, as far as they answered their last probe."""
    if any(policy.lacks_model for policy in policies if policy.up):
        return "missing"
    return "served" if all(policy.up for policy in policies) else "unknown"


def metrics_router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["metrics"])
    collector = StateCollector(services)

    @routes.get("/metrics", response_class=Response, responses=content_of("text/plain", "Prometheus' text format"))
    async def metrics() -> Response:
        """The counters of all processes of `--workers`, whichever of them answers."""
        now = generate_latest(registry_of(await collector.collect()))
        return Response(generate_latest(services.recorder.metrics.scraped) + now, media_type=CONTENT_TYPE_LATEST)

    return routes


def diagnosis_router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["metrics"])

    @routes.get("/diagnosis")
    async def diagnosis() -> Diagnosis:
        """Asks the store, Redis, the disks and the engines now."""
        return await ServerDiagnosis(services).run()

    return routes
