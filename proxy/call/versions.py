"""Which weights tokens were sampled from, where the engine does not say it with them.

A call's tokens are of one version if the policy had it when the call began and still has it once they are sampled. Only
the process that pushed weights knows at once; the others ask the ledger, whose version changes while the engines are
paused. An engine that says versions, though not in this reply (it was cut before its end), must have said this one
last: else somebody pushes to it behind rolltap's back, and what it sampled from is not known.

Where an engine can be asked which version it serves, its own word counts, whoever pushes. It is asked after the call,
and before it where it says no versions with its tokens; else what it said last stands for that.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rolltap.contract.trainer import PolicyState
from rolltap.errors import StoreUnavailable
from rolltap.proxy.call.policies import Policies, Policy
from rolltap.proxy.engines.base import StatesWeights
from rolltap.tenants import acting_for

ReadPolicies = Callable[[], Awaitable[Sequence[PolicyState]]]
"""The policies as the ledger has them."""


class Versions(Protocol):
    """Where a policy's version is asked for."""

    async def now(self, policy: Policy) -> int | None:
        """The version that `policy` has at some moment of this call; None if it can't be told."""
        ...

    async def at_begin(self, policy: Policy) -> int | None:
        """The version that a call begins with; None if its engine, which has to say it, did not."""
        engine = _asked(policy)
        if engine is None:
            return policy.version
        return policy.stated_version if policy.weight_versions else await engine.served_weights()

    async def behind(self, policy: Policy, version: int | None) -> bool:
        """Whether tokens of a call that began at `version` are surely of it, though their engine did not say so."""
        if version is None:
            return False
        if (engine := _asked(policy)) is not None:
            return version == await engine.served_weights()
        stated = version if not policy.weight_versions else policy.stated_version
        return stated == version == await self.now(policy)


def _asked(policy: Policy) -> StatesWeights | None:
    """The engine, where it can be asked for its version."""
    return policy.engine if policy.states_weights and isinstance(policy.engine, StatesWeights) else None


class OwnVersions(Versions):
    """Of a proxy that nobody else pushes beside."""

    async def now(self, policy: Policy) -> int | None:
        return policy.version


@dataclass(slots=True)
class _Readings:
    """Of one tenant's policies: how many have begun, and which was done last."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    begun: int = 0
    done: int = 0


class SharedVersions(Versions):
    """Of several proxies on one ledger: one reading of it serves all of a tenant who asked before it began.

    The ledger also has the row that a policy had as another tenant's, by the same name.
    """

    def __init__(self, policies: Policies, read: ReadPolicies) -> None:
        self._policies = policies
        self._read = read
        self._of_tenant: defaultdict[str, _Readings] = defaultdict(_Readings)

    async def now(self, policy: Policy) -> int | None:
        readings = self._of_tenant[policy.settings.tenant]
        ticket = readings.begun
        async with readings.lock:
            try:
                if readings.done <= ticket:
                    with acting_for(policy.settings.tenant):
                        await self._learn(readings)
            except StoreUnavailable:
                return None
        return policy.version

    async def _learn(self, readings: _Readings) -> None:
        readings.begun += 1
        reading = readings.begun
        states = {state.name: state.version for state in await self._read()}
        for policy in self._policies:
            policy.version = states.get(policy.name, policy.version)
        readings.done = reading
