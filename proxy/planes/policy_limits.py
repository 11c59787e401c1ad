"""Enforces keys that are limited to named policies on the trainer plane."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec
from fastapi import Request

from rolltap.contract.base import RequestBody
from rolltap.contract.keys import Caller
from rolltap.errors import InvalidRequest
from rolltap.proxy.planes.bodies import body_of
from rolltap.proxy.planes.services import Services


def limit_to_policies(services: Services) -> Callable[..., Awaitable[None]]:
    """A dependency that refuses requests for other policies than the key's. Does nothing for keys without a limit."""

    async def dependency(request: Request) -> None:
        by: Caller = request.state.caller
        if by.policies is not None:
            by.check_policies(sorted(await _concerned(services, request)))

    return dependency


class NamedPolicies(RequestBody, frozen=True, forbid_unknown_fields=False):
    """What a body says about policies. The route reads all of it later."""

    policy: str = ""
    trainer: str = ""
    versions: Mapping[str, Any] = msgspec.field(default_factory=dict)


async def _concerned(services: Services, request: Request) -> Collection[str]:
    """The policies that the request reads or changes."""
    trainers = services.ledger.trainers
    match request.scope["route"].path.split("/")[1:], request.path_params:
        case ["policies", *_], {"name": name}:
            return {name}
        case ["leases"], _:
            body = await body_of(NamedPolicies)(request)
            return {body.policy, *await trainers.policies_of_trainer(body.trainer)}
        case ["leases", *_], {"lease_id": lease_id}:
            return await trainers.policies_of_lease(lease_id)
        case ["trainers", _], {"name": name}:
            return await trainers.policies_of_trainer(name)
        case ["trainers", *_], {"name": name}:
            return {*(await body_of(NamedPolicies)(request)).versions, *await trainers.policies_of_trainer(name)}
        case ["dead-letters"], _ if (policy := request.query_params.get("policy")) is not None:
            return {policy}
        case ["dead-letters"], _:
            raise InvalidRequest("policy: this key is for named policies; name one", param="policy")
        case ["dead-letters", *_], {"group_id": group_id}:
            return {(await services.ledger.groups.get(group_id)).policy}
        case path, _:
            raise AssertionError(f"say which policies {path} concerns")
