"""Nodes on the admin plane: `rolltap node` and Ray's actors claim rollouts here."""

from __future__ import annotations

from fastapi import APIRouter

from rolltap.contract.admin import (
    AssignedRollouts,
    ClaimRollouts,
    Heartbeat,
    HeldRollouts,
    ReleasedRollouts,
    WorkWaits,
)
from rolltap.proxy.front.access import By
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.slices import sliced


def node_router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["nodes"], route_class=sliced({}))
    nodes = services.ledger.nodes

    @routes.get("/nodes/waiting")
    async def waiting(submission: str | None = None) -> WorkWaits:
        """True while unclaimed work exists, including work blocked by backpressure."""
        return WorkWaits(await nodes.has_work(submission))

    @routes.post("/nodes/{node}/claim")
    async def claim(node: str, body: ClaimRollouts, by: By) -> AssignedRollouts:
        """Claims up to `capacity` rollouts for `ttl` seconds. Waits up to `wait` seconds for the first one."""
        return AssignedRollouts(await nodes.claim(node, body, by))

    @routes.post("/nodes/{node}/heartbeat")
    async def heartbeat(node: str, body: Heartbeat, by: By) -> HeldRollouts:
        """Extends the claims of `tokens` by `ttl` seconds. Returns the rollouts that are still claimed with them."""
        return HeldRollouts(node, await nodes.heartbeat(body.tokens, body.ttl, by))

    @routes.post("/nodes/{node}/release")
    async def release(node: str, by: By) -> ReleasedRollouts:
        """Releases all claims of the node, so that other nodes can run its rollouts at once."""
        return ReleasedRollouts(node, await nodes.release(node, by))

    return routes
