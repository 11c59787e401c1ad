"""`GET /diagnosis` for `rolltap doctor --server`: what this process finds out about itself, by admin or viewer key."""

from __future__ import annotations

from fastapi import APIRouter

from rolltap.contract.diagnosis import Diagnosis
from rolltap.proxy.diagnosis.server import ServerDiagnosis
from rolltap.proxy.routes.services import Services


def diagnosis_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["metrics"])

    @routes.get("/diagnosis")
    async def diagnosis() -> Diagnosis:
        """Asks the store, Redis, the disks and the engines now."""
        return await ServerDiagnosis(services).run()

    return routes
