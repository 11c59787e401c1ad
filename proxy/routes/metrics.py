"""`GET /metrics`: this process's counters for Prometheus, by admin key."""

from __future__ import annotations

from fastapi import APIRouter, Response

from rolltap.proxy.call.metrics import CONTENT_TYPE
from rolltap.proxy.call.policies import Policy
from rolltap.proxy.engines.pool import EnginePool
from rolltap.proxy.routes.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["metrics"])

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        policies = list(services.policies)
        engines = {name: up for policy in policies for name, up in engines_up(policy)}
        versions = {policy.name: policy.version for policy in policies}
        text = services.recorder.metrics.text(forged=services.handles.forged, versions=versions, engines=engines)
        return Response(text, media_type=CONTENT_TYPE)

    return routes


def engines_up(policy: Policy) -> list[tuple[str, bool]]:
    """The engine, or each replica of a pool, and whether it serves as far as is known."""
    if isinstance(policy.engine, EnginePool):
        return [(replica.engine.name, policy.up and not replica.ejected) for replica in policy.engine.replicas]
    return [(policy.engine.name, policy.up)]
