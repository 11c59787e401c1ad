"""Weights that a trainer sends over a process group, and a policy's engines receive."""

from __future__ import annotations

from fastapi import APIRouter

from rolltap.contract.trainer import LOST, EngineRanks, ServedVersion, Transfer
from rolltap.errors import EngineError, EngineRefused, LedgerError, WeightsLost
from rolltap.proxy.call.policies import Policy
from rolltap.proxy.engines.receivers import Receiver
from rolltap.proxy.routes.policies import policy_of, serve_version
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.slices import sliced


def transfer_router(services: Services) -> APIRouter:
    """Replaces the push between `begin_update` and `finish_update`."""
    routes = APIRouter(tags=["policies"], route_class=sliced({}))
    policies = services.ledger.policies

    @routes.get("/policies/{name}/ranks")
    async def ranks(name: str) -> EngineRanks:
        return EngineRanks(name, await _receiver(policy_of(services, name)).ranks())

    @routes.post("/policies/{name}/receive")
    async def receive(name: str, body: Transfer) -> ServedVersion:
        policy = policy_of(services, name)
        receiver = _receiver(policy)
        await policies.assign_version(name, body.version, body.digest, body)
        before = (await policies.get(name)).paused
        if before is None:
            raise LedgerError(f"policy {name!r} is not paused: begin_update comes first")
        await receiver.join(body)
        await policies.set_paused(name, LOST)  # before it starts: this process may crash in the middle
        try:
            await receiver.receive(body)
        except WeightsLost:
            raise
        except EngineError:
            await policies.set_paused(name, before)
            raise
        return await serve_version(services, policy, body.version)

    return routes


def _receiver(policy: Policy) -> Receiver:
    receiver = policy.engine.receiver
    if receiver is None:
        message = f"engine {policy.engine.name} can't receive weights over a process group; push a folder"
        raise EngineRefused(message, http_status=501)
    return receiver
