"""Leases on the trainer plane: whole groups out, acknowledgements in. Bodies of leases are `rolltap.wire` payloads."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from rolltap import wire
from rolltap.ledger.claims import LeaseRequest
from rolltap.ledger.replay import ReplayFilter
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.values import Integer, Limit
from rolltap.types import Lease

MAX_WAIT_S = 300.0


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Replay(Body):
    """Which acknowledged groups to lease again: see `rolltap.ledger.replay.ReplayFilter`."""

    min_age: Integer = 0
    max_age: Integer | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    tags: tuple[str, ...] = ()
    order: Literal["newest", "random"] = "newest"


class LeaseBody(Body):
    trainer: str
    policy: str
    groups: int
    max_staleness: Integer | None = None
    wait: float = Field(0.0, ge=0, le=MAX_WAIT_S)
    ttl: float = Field(600.0, gt=0)
    batch: Integer | None = None
    stale: Literal["drop", "keep"] = "drop"
    at_least: int | None = Field(None, ge=1)
    replay: Replay | None = None


class Extend(Body):
    token: int
    ttl: float | None = None


class Acknowledge(Body):
    token: int
    step: int


class Refuse(Body):
    token: int
    reason: str
    blamed: list[str] = []


class Token(Body):
    token: int


class Rewind(Body):
    step: int
    versions: dict[str, Integer]


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["leases"])
    trainers = services.ledger.trainers

    @routes.post("/leases")
    async def lease(body: LeaseBody) -> Response:
        """Up to `groups` whole groups, as soon as `at_least` are ready; 204 if none was within `wait` seconds."""
        request = LeaseRequest(
            body.trainer, body.policy, body.groups, body.max_staleness, body.ttl, body.batch, body.stale
        )
        if body.replay is not None:
            found = await trainers.replay(request, ReplayFilter(**body.replay.model_dump()))
        else:
            found = await trainers.lease(request, wait=body.wait, at_least=body.at_least)
        return await _payload(found)

    @routes.post("/leases/{lease_id}/extend")
    async def extend(lease_id: str, body: Extend) -> dict[str, float]:
        return {"expires_in": await trainers.extend(lease_id, body.token, body.ttl)}

    @routes.post("/leases/{lease_id}/ack")
    async def acknowledge(lease_id: str, body: Acknowledge) -> dict[str, int]:
        return {"groups": await trainers.acknowledge(lease_id, body.token, body.step)}

    @routes.post("/leases/{lease_id}/nack")
    async def refuse(lease_id: str, body: Refuse) -> dict[str, int]:
        return {"dead": await trainers.refuse(lease_id, body.token, body.reason, body.blamed)}

    @routes.post("/leases/{lease_id}/release")
    async def release(lease_id: str, body: Token) -> dict[str, str]:
        await trainers.release(lease_id, body.token)
        return {"lease_id": lease_id}

    @routes.post("/trainers/{name}/rewind")
    async def rewind(name: str, body: Rewind) -> dict[str, Any]:
        return asdict(await trainers.rewind(name, body.step, body.versions))

    @routes.get("/dead-letters")
    async def dead_letters(policy: str | None = None, limit: Limit = 100) -> dict[str, Any]:
        found = await trainers.dead_letters(policy, min(limit, 1000))
        return {"dead_letters": [asdict(letter) for letter in found]}

    @routes.post("/dead-letters/{group_id}/revive")
    async def revive(group_id: str) -> dict[str, str]:
        await trainers.revive(group_id)
        return {"group_id": group_id}

    return routes


async def _payload(lease: Lease) -> Response:
    if not lease.groups:
        return Response(status_code=204)
    return Response(await asyncio.to_thread(wire.pack, lease), media_type=wire.CONTENT_TYPE)
