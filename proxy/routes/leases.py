"""Leases on the trainer plane: whole groups out, acknowledgements in. A lease is a `rolltap.wire` payload."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from rolltap import wire
from rolltap.contract.leases import Lease
from rolltap.contract.trainer import AckLease, ExtendLease, LeaseRequest, NackLease, ReleaseLease, Rewind
from rolltap.ledger.leases import LeaseKey
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.values import Limit


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["leases"])
    trainers = services.ledger.trainers

    @routes.post("/leases")
    async def lease(body: LeaseRequest) -> Response:
        """Up to `groups` whole groups, as soon as `at_least` are ready; 204 if none was within `wait` seconds."""
        return await _payload(await trainers.lease(body))

    @routes.post("/leases/{lease_id}/extend")
    async def extend(lease_id: str, body: ExtendLease) -> dict[str, float]:
        return {"expires_in": await trainers.extend(_key(lease_id, body), body.ttl)}

    @routes.post("/leases/{lease_id}/ack")
    async def acknowledge(lease_id: str, body: AckLease) -> dict[str, int]:
        return {"groups": await trainers.acknowledge(_key(lease_id, body), body.step)}

    @routes.post("/leases/{lease_id}/nack")
    async def refuse(lease_id: str, body: NackLease) -> dict[str, int]:
        return {"dead": await trainers.refuse(_key(lease_id, body), body.reason, body.blamed)}

    @routes.post("/leases/{lease_id}/release")
    async def release(lease_id: str, body: ReleaseLease) -> dict[str, str]:
        await trainers.release(_key(lease_id, body))
        return {"lease_id": lease_id}

    @routes.post("/trainers/{name}/rewind")
    async def rewind(name: str, body: Rewind) -> dict[str, Any]:
        return asdict(await trainers.rewind(name, body))

    @routes.get("/dead-letters")
    async def dead_letters(policy: str | None = None, limit: Limit = 100) -> dict[str, Any]:
        letters = await trainers.dead_letters(policy, min(limit, 1000))
        return {"dead_letters": [asdict(letter) for letter in letters]}

    @routes.post("/dead-letters/{group_id}/revive")
    async def revive(group_id: str) -> dict[str, str]:
        await trainers.revive(group_id)
        return {"group_id": group_id}

    return routes


def _key(lease_id: str, body: ExtendLease | AckLease | NackLease | ReleaseLease) -> LeaseKey:
    return LeaseKey(lease_id, body.token, body.incarnation)


async def _payload(lease: Lease) -> Response:
    if not lease.groups:
        return Response(status_code=204)
    return Response(await asyncio.to_thread(wire.pack, lease), media_type=wire.CONTENT_TYPE)
