"""Policies: read on both planes, their weights updated on the trainer plane."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rolltap.errors import EngineError, EngineRefused, LedgerError, UnknownPolicy, WeightsLost
from rolltap.ledger.base import LOST
from rolltap.proxy.engines.receivers import Bucket, Receiver, Transfer
from rolltap.proxy.policies import Policy
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.values import Integer


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BeginUpdate(Body):
    mode: Literal["keep", "drain", "abort"] = "keep"


class Push(Body):
    path: str = Field(min_length=1)
    version: Integer = Field(ge=0)
    adapter: bool = Field(False, description="`path` holds a peft adapter, which the policy's model name stands for")


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


def admin_router(services: Services) -> APIRouter:
    """What the policies are and how they stand."""
    routes = APIRouter(tags=["policies"])

    @routes.get("/policies")
    async def list_policies() -> dict[str, Any]:
        return {"policies": [await _state(services, runtime) for runtime in services.policies]}

    @routes.get("/policies/{name}")
    async def show_policy(name: str) -> dict[str, Any]:
        return await _state(services, _runtime(services, name))

    return routes


def trainer_router(services: Services) -> APIRouter:
    """Weight updates: begin, push or receive, finish. A failed push leaves the old weights and the old version; a
    transfer that broke off in the middle leaves the policy standing still (`paused` is `lost`) until a whole push."""
    routes = APIRouter(tags=["policies"])
    policies = services.ledger.policies

    @routes.get("/policies/{name}")
    async def show_policy(name: str) -> dict[str, Any]:
        return await _state(services, _runtime(services, name))

    @routes.post("/policies/{name}/begin_update")
    async def begin_update(name: str, body: BeginUpdate) -> dict[str, str]:
        runtime = _runtime(services, name)
        await runtime.engine.pause(body.mode)
        if (await policies.get(name)).paused != LOST:
            await policies.set_paused(name, body.mode)
        return {"policy": name, "paused": body.mode}

    @routes.post("/policies/{name}/push")
    async def push(name: str, body: Push) -> dict[str, Any]:
        runtime = _runtime(services, name)
        await policies.give_version(name, body.version)
        if body.adapter and (await policies.get(name)).paused == LOST:
            raise _still_lost(name)
        adapter = (runtime.settings.model or name) if body.adapter else ""
        await runtime.engine.load_weights(body.path, body.version, adapter)
        return await served(runtime, body.version)

    @routes.get("/policies/{name}/ranks")
    async def ranks(name: str) -> dict[str, Any]:
        return {"policy": name, "ranks": await _receiver(_runtime(services, name)).ranks()}

    @routes.post("/policies/{name}/receive")
    async def receive(name: str, body: Receive) -> dict[str, Any]:
        runtime = _runtime(services, name)
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
        return await served(runtime, body.version)

    async def served(runtime: Policy, version: int) -> dict[str, Any]:
        """The engines hold `version` now, all of it."""
        state = await policies.set_version(runtime.name, version)
        runtime.version = state.version
        if state.paused == LOST:
            await policies.set_paused(runtime.name, "keep")
        return {"policy": runtime.name, "version": state.version}

    @routes.post("/policies/{name}/finish_update")
    async def finish_update(name: str) -> dict[str, str]:
        runtime = _runtime(services, name)
        if (await policies.get(name)).paused == LOST:
            raise _still_lost(name)
        await runtime.engine.resume()
        await policies.set_paused(name, None)
        return {"policy": name}

    return routes


def _runtime(services: Services, name: str) -> Policy:
    if name not in services.policies.names:
        raise UnknownPolicy(f"no policy {name!r}; served: {', '.join(services.policies.names)}")
    return services.policies[name]


def _receiver(runtime: Policy) -> Receiver:
    receiver = runtime.engine.receiver
    if receiver is None:
        message = f"engine {runtime.engine.name} takes weights from a folder only, if at all"
        raise EngineRefused(message, http_status=501)
    return receiver


def _still_lost(name: str) -> WeightsLost:
    return WeightsLost(f"policy {name!r}: its last transfer of weights broke off; it goes on after a whole push")


async def _state(services: Services, runtime: Policy) -> dict[str, Any]:
    state = await services.ledger.policies.get(runtime.name)
    stats = await services.ledger.policies.stats(runtime.name)
    return {**asdict(state), "engine": runtime.engine.name, "trainable": runtime.settings.trainable, **asdict(stats)}
