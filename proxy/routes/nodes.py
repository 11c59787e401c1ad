"""Nodes on the admin plane: `rolltap node` and Ray's actors claim rollouts here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from rolltap.contract.admin import Heartbeat, LeaseRollouts
from rolltap.proxy.access import By
from rolltap.proxy.routes.services import Services


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["nodes"])
    nodes = services.ledger.nodes

    @routes.get("/nodes/waiting")
    async def waiting(submission: str | None = None) -> dict[str, bool]:
        """True while unclaimed work exists, including work blocked by backpressure."""
        return {"waiting": await nodes.anything_waits(submission)}

    @routes.post("/nodes/{node}/lease")
    async def lease(node: str, body: LeaseRollouts, by: By) -> dict[str, Any]:
        """Up to `capacity` rollouts, each the node's for `ttl` seconds; waits up to `wait` seconds for the first."""
        return {"rollouts": [asdict(rollout) for rollout in await nodes.lease(node, body, by)]}

    @routes.post("/nodes/{node}/heartbeat")
    async def heartbeat(node: str, body: Heartbeat, by: By) -> dict[str, Any]:
        """The claims of `tokens` hold for `ttl` seconds more; answers the rollouts that are still theirs."""
        return {"node": node, "rollouts": list(await nodes.heartbeat(body.tokens, body.ttl, by))}

    @routes.post("/nodes/{node}/release")
    async def release(node: str, by: By) -> dict[str, Any]:
        """Everything the node holds is to be run by others at once."""
        return {"node": node, "released": await nodes.release(node, by)}

    return routes
