"""The server's state: probes without a key, its metrics and its diagnosis.

`/health`: is this process running? `/ready`: can it accept a new call? It is 200 or 503 and reports the state of each
part, without addresses or names: `store` (ok, away), `spool` (ok, full, none) and `engines` (up, down). `models`
(served, missing; unknown while an engine is down) does not affect the status, because an adapter appears only with the
trainer's first push. While the store is unavailable, a proxy with room in its spool is ready: otherwise all proxies of
one Postgres would be taken out of service at once although each can continue. A server that was told to stop is 503
with the status `stopping`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rolltap.contract.admin import Diagnosis
from rolltap.contract.planes import StatePlane
from rolltap.proxy.diagnosis import ServerDiagnosis
from rolltap.proxy.metrics.scrape_state import StateCollector, engines_up, registry_of
from rolltap.proxy.planes.router import answer
from rolltap.proxy.planes.services import Routes, Services

SPOOL: dict[bool | None, Literal["ok", "full", "none"]] = {None: "none", True: "ok", False: "full"}


@dataclass(frozen=True, slots=True)
class Alive:
    """The process is running."""

    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether a new call could be taken, and which part it waits for.

    `models` is `missing` where an engine that is up did not list a policy's model, `unknown` where an engine is down.
    `weights` is `wrong` while an engine has other weights than a policy's: that policy's calls are refused.
    `tokenizers` is `differ` while an engine has another one than a policy, whose calls are refused then too.
    `clock` is `off` if this machine's clock differs from the store's by over 2 s. `proxies` is `differ` while another
    proxy of the store has other keys or policies.
    """

    status: Literal["ready", "not ready", "stopping"]
    store: Literal["ok", "away"]
    spool: Literal["ok", "full", "none"]
    engines: Literal["up", "down"]
    models: Literal["served", "missing", "unknown"]
    weights: Literal["right", "wrong"] = "right"
    tokenizers: Literal["same", "differ"] = "same"
    clock: Literal["ok", "off"] = "ok"
    proxies: Literal["same", "differ"] = "same"


def probes(services: Services) -> APIRouter:
    """The routes that need no key."""
    routes = APIRouter()
    readiness: dict[int | str, dict[str, Any]] = {
        200: answer("Successful Response", Readiness),
        503: answer("no new call could be taken", Readiness),
    }

    @routes.get("/health", response_model=None, responses={200: answer("Successful Response", Alive)})
    async def health() -> Response:
        return Response(msgspec.json.encode(Alive()), media_type="application/json")

    @routes.get("/ready", response_model=None, responses=readiness)
    async def ready() -> Response:
        condition = await services.call_log.condition()
        policies = services.policies.all
        engines = all(any(up for _, up in engines_up(policy)) for policy in policies)
        takes_calls = condition.takes_calls and engines and not services.stopping
        lacks_model = any(policy.lacks_model for policy in policies if policy.up)  # by its engines' last probe
        state = Readiness(
            status="stopping" if services.stopping else "ready" if takes_calls else "not ready",
            store="ok" if condition.store else "away",
            spool=SPOOL[condition.spool],
            engines="up" if engines else "down",
            models="missing" if lacks_model else "served" if all(policy.up for policy in policies) else "unknown",
            weights="wrong" if any(policy.wrong_weights for policy in policies) else "right",
            tokenizers="differ" if any(policy.wrong_tokenizer for policy in policies) else "same",
            clock="off" if condition.clock_is_off else "ok",
            proxies="differ" if services.peers.differences else "same",
        )
        return Response(msgspec.json.encode(state), 200 if takes_calls else 503, media_type="application/json")

    return routes


@dataclass(frozen=True)
class StateRoutes(Routes, StatePlane):
    collector: StateCollector

    async def metrics(self) -> Any:
        metrics, collector = self.services.recorder.metrics, self.collector
        metrics.state = await collector.of_process()
        of_store = generate_latest(registry_of(await collector.of_store()))
        return Response(generate_latest(metrics.scraped) + of_store, media_type=CONTENT_TYPE_LATEST)

    async def diagnosis(self) -> Diagnosis:
        return await ServerDiagnosis(self.services).run()
