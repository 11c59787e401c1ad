"""Policies: read on both planes, their weights updated on the trainer plane."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from fastapi import APIRouter

from rolltap.contract.control import PolicyList, PolicyStatus, RolloutControl, SetControl
from rolltap.contract.trainer import (
    LOST,
    BeginUpdate,
    FinishUpdate,
    OwnerRequest,
    PolicyPaused,
    PolicyResumed,
    PushWeights,
    ServedVersion,
)
from rolltap.errors import EngineUnavailable, InvalidRequest, UnknownPolicy, WeightsLost
from rolltap.extras import page
from rolltap.proxy.call.policy import Policy
from rolltap.proxy.routes.answers import fields_of
from rolltap.proxy.routes.services import Services
from rolltap.proxy.routes.slices import sliced

SYSTEM_FOLDERS = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")


def admin_router(services: Services) -> APIRouter:
    """The policies with their versions and counts, and their controls without a trainer."""
    routes = APIRouter(tags=["policies"], route_class=sliced({}))

    @routes.get("/policies")
    async def list_policies() -> PolicyList:
        return PolicyList([await _state(services, policy) for policy in services.policies])

    @routes.get("/policies/{name}")
    async def show_policy(name: str) -> PolicyStatus:
        return await _state(services, policy_of(services, name))

    @routes.post("/policies/{name}/control")
    async def set_control(name: str, body: RolloutControl) -> RolloutControl:
        """Sets what holds for rollouts to come, in place of all that was set before. Also on the trainer plane."""
        return await _control(services, name, body, None)

    return routes


def trainer_router(services: Services) -> APIRouter:
    """Weight updates: begin, push (or receive: `routes/transfers.py`), finish; by the trainer that owns the policy.

    A failed push leaves the old weights and the old version. After a transfer that broke off in the middle the policy
    serves nothing (`paused` is `lost`) until a whole push.
    """
    routes = APIRouter(tags=["policies"], route_class=sliced({}))
    policies = services.ledger.policies

    @routes.get("/policies/{name}")
    async def show_policy(name: str) -> PolicyStatus:
        return await _state(services, policy_of(services, name))

    @routes.post("/policies/{name}/begin_update")
    async def begin_update(name: str, body: BeginUpdate) -> PolicyPaused:
        policy = policy_of(services, name)
        await policies.check_weights_owner(name, body)
        await policy.engine.pause(body.mode)
        if (await policies.get(name)).paused != LOST:
            await policies.set_paused(name, body.mode)
        return PolicyPaused(name, body.mode)

    @routes.post("/policies/{name}/push")
    async def push(name: str, body: PushWeights) -> ServedVersion:
        policy = policy_of(services, name)
        check_weights_path(body.path, policy.settings.weights_roots)
        if body.adapter and (await policies.get(name)).paused == LOST:
            raise still_lost(name)
        await policies.assign_version(name, body.version, body.digest, body)
        adapter = (policy.settings.model or name) if body.adapter else ""
        await policy.engine.load_weights(body.path, body.version, adapter)
        return await serve_version(services, policy, body.version, body.path, adapter)

    @routes.post("/policies/{name}/control")
    async def set_control(name: str, body: SetControl) -> RolloutControl:
        """Sets what holds for rollouts to come, in place of all that was set before. Also on the admin plane.

        The trainer must own the policy: a fenced one would control the rollouts of its successor.
        """
        return await _control(services, name, body.control, body)

    @routes.post("/policies/{name}/finish_update")
    async def finish_update(name: str, body: FinishUpdate) -> PolicyResumed:
        policy = policy_of(services, name)
        await policies.check_weights_owner(name, body)
        if (await policies.get(name)).paused == LOST:
            raise still_lost(name)
        await policy.engine.resume()
        await policies.set_paused(name, None)
        return PolicyResumed(name)

    return routes


def check_weights_path(path: str, roots: Sequence[str]) -> None:
    """Raises unless `path` is a plain absolute path in one of `roots`; without any, outside the system's folders.

    It is the engine's path, so nothing is looked up here: a link in a root is the engine's to follow.
    """
    if not path.startswith("/") or path.startswith("//") or path != posixpath.normpath(path) or not path.isprintable():
        raise InvalidRequest(f"path: {path[:200]!r} is not the absolute, plain path of a folder", param="path")
    if roots and not _lies_in(path, roots):
        allowed = ", ".join(roots)
        raise InvalidRequest(f"path: {path[:200]!r} is in none of the policy's weights_roots ({allowed})", param="path")
    if not roots and _lies_in(path, SYSTEM_FOLDERS):
        raise InvalidRequest(f"path: {path[:200]!r} is in one of the system's own folders", param="path")


def _lies_in(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(folder.rstrip("/") + "/") for folder in folders)


def policy_of(services: Services, name: str) -> Policy:
    if name not in services.policies.names:
        raise UnknownPolicy(f"no policy {name!r}; served: {', '.join(services.policies.names)}")
    return services.policies[name]


async def serve_version(
    services: Services, policy: Policy, version: int, folder: str = "", adapter: str = ""
) -> ServedVersion:
    """Records that the engines hold all of `version`, which they can load again from `folder` if there is one."""
    policies = services.ledger.policies
    state = await policies.set_version(policy.name, version, folder, adapter)
    policy.version, policy.wrong_weights = state.version, ""
    if state.paused == LOST:
        await policies.set_paused(policy.name, "keep")
    return ServedVersion(policy.name, state.version)


def still_lost(name: str) -> WeightsLost:
    return WeightsLost(f"policy {name!r}: its last transfer of weights broke off; push whole weights to continue")


async def _state(services: Services, policy: Policy) -> PolicyStatus:
    state = await services.ledger.policies.get(policy.name)
    stats = await services.ledger.policies.stats(policy.name)
    values = fields_of(state) | fields_of(stats)
    control, run = await services.ledger.controls.with_run(policy.name)
    return PolicyStatus(
        **values,
        engine=policy.engine.name,
        trainable=policy.settings.trainable,
        relayed=policy.source.relayed_dialects,
        context=policy.context,
        weights=policy.wrong_weights,
        control=control,
        control_run=run,
    )


async def _control(services: Services, name: str, control: RolloutControl, by: OwnerRequest | None) -> RolloutControl:
    policy = policy_of(services, name)
    if control.temperature is not None:
        check_temperature(policy, control.temperature)
    await services.ledger.controls.set(policy.name, control, by)
    return control


def check_temperature(policy: Policy, temperature: float) -> None:
    """Raises if calls of the policy at this temperature could not be trained, or would not be sampled at it.

    `EngineUnavailable` if its engine has not answered since the server's start, as only the engine knows.
    """
    problem = ""
    if not policy.settings.trainable or not policy.source.sets_sampling:
        problem = "it is not trained, and samples as harnesses ask"
    elif temperature != 1.0 and not policy.known:
        raise EngineUnavailable(f"engine {policy.engine.name} has not answered yet, so its log-probs are not known")
    elif temperature != 1.0 and policy.logprobs_mode != "processed":
        problem = (
            f"its engine's log-probs ({policy.logprobs_mode}) are not at the sampling temperature, so a trainer could "
            f"not use them ({page('engines')})"
        )
    if problem:
        raise InvalidRequest(f"temperature {temperature} for policy {policy.name!r}: {problem}", param="temperature")
