"""Claims on rollouts, on the admin plane: what `rolltap node` and Ray's actors live by."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rolltap.ledger.nodes import NodeRequest
from rolltap.proxy.routes.services import Services

MAX_WAIT_S = 50.0


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LeaseRollouts(Body):
    capacity: int
    ttl: float = 15.0
    wait: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    submission: str | None = None


class Heartbeat(Body):
    ttl: float = 15.0
    tokens: list[str] = Field([], max_length=4096)


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["nodes"])
    nodes = services.ledger.nodes

    @routes.get("/nodes/waiting")
    async def waiting(submission: str | None = None) -> dict[str, bool]:
        """Whether anything is left that nobody runs, be it that its trainers have no room yet."""
        return {"waiting": await nodes.anything_waits(submission)}

    @routes.post("/nodes/{node}/lease")
    async def lease(node: str, body: LeaseRollouts) -> dict[str, Any]:
        """Up to `capacity` rollouts, each the node's for `ttl` seconds; waits up to `wait` seconds for the first."""
        request = NodeRequest(node, body.capacity, body.ttl, body.submission)
        return {"rollouts": [asdict(given) for given in await nodes.lease(request, wait=body.wait)]}

    @routes.post("/nodes/{node}/heartbeat")
    async def heartbeat(node: str, body: Heartbeat) -> dict[str, Any]:
        """The claims of `tokens` hold for `ttl` seconds more; answers the rollouts that are still theirs."""
        return {"node": node, "rollouts": list(await nodes.heartbeat(body.tokens, body.ttl))}

    @routes.post("/nodes/{node}/release")
    async def release(node: str) -> dict[str, Any]:
        """Everything the node holds is to be run by others at once."""
        return {"node": node, "released": await nodes.release(node)}

    return routes
