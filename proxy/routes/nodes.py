"""Nodes on the admin plane: `rolltap node` and Ray's actors claim rollouts here."""

from __future__ import annotations

from fastapi import APIRouter

from rolltap.contract.admin import Heartbeat, LeaseRollouts
from rolltap.proxy.access import By
from rolltap.proxy.routes.answers import AssignedRollouts, HeldRollouts, ReleasedRollouts, WorkWaits
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.slices import sliced


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["nodes"], route_class=sliced({}))
    nodes = services.ledger.nodes

    @routes.get("/nodes/waiting")
    async def waiting(submission: str | None = None) -> WorkWaits:
        """True while unclaimed work exists, including work blocked by backpressure."""
        return WorkWaits(await nodes.has_work(submission))

    @routes.post("/nodes/{node}/lease")
    async def lease(node: str, body: LeaseRollouts, by: By) -> AssignedRollouts:
        """Up to `capacity` rollouts, each the node's for `ttl` seconds; waits up to `wait` seconds for the first."""
        return AssignedRollouts(await nodes.lease(node, body, by))

    @routes.post("/nodes/{node}/heartbeat")
    async def heartbeat(node: str, body: Heartbeat, by: By) -> HeldRollouts:
        """The claims of `tokens` hold for `ttl` seconds more; answers the rollouts that are still theirs."""
        return HeldRollouts(node, await nodes.heartbeat(body.tokens, body.ttl, by))

    @routes.post("/nodes/{node}/release")
    async def release(node: str, by: By) -> ReleasedRollouts:
        """Everything the node holds is to be run by others at once."""
        return ReleasedRollouts(node, await nodes.release(node, by))

    return routes
