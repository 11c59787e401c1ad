"""`GET /metrics` for Prometheus, by admin or viewer key: the counters of this server, and the state of the parts."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rolltap.proxy.metrics.scrape_state import StateCollector, registry_of
from rolltap.proxy.routes.answers import content_of
from rolltap.proxy.routes.services import Services


def metrics_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["metrics"])
    collector = StateCollector(services)

    @routes.get("/metrics", response_class=Response, responses=content_of("text/plain", "Prometheus' text format"))
    async def metrics() -> Response:
        """The counters of all processes of `--workers`, whichever of them answers."""
        now = generate_latest(registry_of(await collector.collect()))
        return Response(generate_latest(services.recorder.metrics.scraped) + now, media_type=CONTENT_TYPE_LATEST)

    return routes
