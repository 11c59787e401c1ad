"""Weights that a trainer sends over a process group: the engines of a policy are told to receive them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from rolltap.errors import EngineError, EngineRefused, LedgerError, WeightsLost
from rolltap.ledger.base import LOST
from rolltap.proxy.call.policies import Policy
from rolltap.proxy.engines.receivers import Bucket, Receiver, Transfer
from rolltap.proxy.routes.policies import Body, policy_of, serve_version
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.values import Integer


class Tensors(Body):
    names: list[str] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[list[Annotated[Integer, Field(ge=0)]]]


class Receive(Body):
    version: Integer = Field(ge=0)
    address: str = Field(min_length=1)
    port: Integer = Field(ge=1, le=65_535)
    group: str = Field(min_length=1)
    world_size: Integer = Field(ge=2)
    backend: Literal["gloo", "nccl"]
    timeout_s: float = Field(gt=0, le=86_400)
    buckets: list[Tensors] = Field(min_length=1)


def router(services: Services) -> APIRouter:
    """Between `begin_update` and `finish_update`, as a push is."""
    routes = APIRouter(tags=["policies"])
    policies = services.ledger.policies

    @routes.get("/policies/{name}/ranks")
    async def ranks(name: str) -> dict[str, Any]:
        return {"policy": name, "ranks": await _receiver(policy_of(services, name)).ranks()}

    @routes.post("/policies/{name}/receive")
    async def receive(name: str, body: Receive) -> dict[str, Any]:
        runtime = policy_of(services, name)
        receiver = _receiver(runtime)
        await policies.give_version(name, body.version)
        before = (await policies.get(name)).paused
        if before is None:
            raise LedgerError(f"policy {name!r} is not paused: begin_update comes first")
        buckets = [Bucket(part.names, part.dtypes, part.shapes) for part in body.buckets]
        transfer = Transfer(**{**body.model_dump(), "buckets": buckets})
        await receiver.join(transfer)
        await policies.set_paused(name, LOST)  # the word is there before the deed: this server may die in it
        try:
            await receiver.receive(transfer)
        except WeightsLost:
            raise
        except EngineError:
            await policies.set_paused(name, before)
            raise
        return await serve_version(services, runtime, body.version)

    return routes


def _receiver(runtime: Policy) -> Receiver:
    receiver = runtime.engine.receiver
    if receiver is None:
        message = f"engine {runtime.engine.name} takes weights from a folder only, if at all"
        raise EngineRefused(message, http_status=501)
    return receiver
