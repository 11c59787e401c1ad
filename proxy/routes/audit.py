"""The audit log on the admin plane: which key did what."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from rolltap.proxy.routes.answers import AuditPage
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.values import Limit


def audit_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["keys"])

    @routes.get("/audit")
    async def read_audit(
        key_id: str | None = None, before: Annotated[int | None, Query(ge=1, lt=2**63)] = None, limit: Limit = 100
    ) -> AuditPage:
        """Lists entries, newest first, optionally of one key. `before` is the last `seq` of the previous page."""
        page = await services.ledger.audit.newest(key_id=key_id, before=before, limit=min(limit, 1000))
        return AuditPage(page)

    return routes
