"""Policies: read on both planes, their weights updated on the trainer plane."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from rolltap.errors import UnknownPolicy
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
    """Weight updates: begin, push, finish. A failed push leaves the old weights and the old version."""
    routes = APIRouter(tags=["policies"])
    policies = services.ledger.policies

    @routes.get("/policies/{name}")
    async def show_policy(name: str) -> dict[str, Any]:
        return await _state(services, _runtime(services, name))

    @routes.post("/policies/{name}/begin_update")
    async def begin_update(name: str, body: BeginUpdate) -> dict[str, str]:
        runtime = _runtime(services, name)
        await runtime.engine.pause(body.mode)
        await policies.set_paused(name, body.mode)
        return {"policy": name, "paused": body.mode}

    @routes.post("/policies/{name}/push")
    async def push(name: str, body: Push) -> dict[str, Any]:
        runtime = _runtime(services, name)
        await policies.give_version(name, body.version)
        adapter = (runtime.settings.model or name) if body.adapter else ""
        await runtime.engine.load_weights(body.path, body.version, adapter)
        state = await policies.set_version(name, body.version)
        runtime.version = state.version
        return {"policy": name, "version": state.version}

    @routes.post("/policies/{name}/finish_update")
    async def finish_update(name: str) -> dict[str, str]:
        runtime = _runtime(services, name)
        await runtime.engine.resume()
        await policies.set_paused(name, None)
        return {"policy": name}

    return routes


def _runtime(services: Services, name: str) -> Policy:
    if name not in services.policies.names:
        raise UnknownPolicy(f"no policy {name!r}; served: {', '.join(services.policies.names)}")
    return services.policies[name]


async def _state(services: Services, runtime: Policy) -> dict[str, Any]:
    state = await services.ledger.policies.get(runtime.name)
    stats = await services.ledger.policies.stats(runtime.name)
    return {**asdict(state), "engine": runtime.engine.name, "trainable": runtime.settings.trainable, **asdict(stats)}
