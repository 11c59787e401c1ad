"""Determines the weight version of sampled tokens if the engine does not return it with them.

All tokens of a call have version v if the policy's version was v when the call began and is still v after sampling. The
process that pushed the weights knows the version at once; other processes read the ledger, whose version changes only
while the engines are paused. If an engine usually returns versions but not in this reply (it was cut off), the last
version it returned must also be v. Otherwise somebody else pushes weights to the engine, and the version is unknown.

If an engine can be asked which version it serves, its answer decides. It is asked after the call. For the version
before the call, the last version that came with tokens is used; an engine that returns none with tokens is asked then.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rolltap.contract.trainer import PolicyState
from rolltap.errors import StoreUnavailable
from rolltap.proxy.call.policies import Policies
from rolltap.proxy.call.policy import Policy
from rolltap.proxy.engines.base import StatesWeights
from rolltap.tenants import acting_for

ReadPolicies = Callable[[], Awaitable[Sequence[PolicyState]]]
"""Reads the policies' state from the ledger."""


class Versions(Protocol):
    """Finds a policy's weight version."""

    async def now(self, policy: Policy) -> int | None:
        """The policy's version at some moment during this await; None if it is unknown."""
        ...

    async def version_at_start(self, policy: Policy) -> int | None:
        """The version at the start of a call; None if the engine should have stated it and did not."""
        engine = _engine_with_versions(policy)
        if engine is None:
            return policy.version
        return policy.stated_version if policy.weight_versions else await engine.served_weights()

    async def all_sampled_at(self, policy: Policy, version: int | None) -> bool:
        """Whether all tokens of a call that began at `version` are certainly of that version."""
        if version is None:
            return False
        if (engine := _engine_with_versions(policy)) is not None:
            return version == await engine.served_weights()
        stated = version if not policy.weight_versions else policy.stated_version
        return stated == version == await self.now(policy)


def _engine_with_versions(policy: Policy) -> StatesWeights | None:
    """The engine, if it can be asked for its version; else None."""
    return policy.engine if policy.states_weights and isinstance(policy.engine, StatesWeights) else None


class LocalVersions(Versions):
    """Versions for a deployment with one proxy: no other process updates weights."""

    async def now(self, policy: Policy) -> int | None:
        return policy.version


@dataclass(slots=True)
class _LedgerReads:
    """Ledger reads for one tenant: how many have started, and the number of the last finished one."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    started: int = 0
    done: int = 0


class LedgerVersions(Versions):
    """Versions for several proxies on one ledger. One read serves all calls of a tenant that asked before it started.

    Each tenant is read separately: two tenants can have policies of the same name.
    """

    def __init__(self, policies: Policies, read: ReadPolicies) -> None:
        self._policies = policies
        self._read = read
        self._of_tenant: defaultdict[str, _LedgerReads] = defaultdict(_LedgerReads)

    async def now(self, policy: Policy) -> int | None:
        reads = self._of_tenant[policy.settings.tenant]
        ticket = reads.started
        async with reads.lock:
            try:
                if reads.done <= ticket:
                    with acting_for(policy.settings.tenant):
                        await self._read_ledger(reads)
            except StoreUnavailable:
                return None
        return policy.version

    async def _read_ledger(self, reads: _LedgerReads) -> None:
        reads.started += 1
        number = reads.started
        states = {state.name: state for state in await self._read()}
        for policy in self._policies:
            if (state := states.get(policy.name)) is not None:
                policy.learn_state(state)
        reads.done = number
