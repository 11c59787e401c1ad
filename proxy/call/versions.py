"""Which weights tokens were sampled from, where the engine does not say it with them.

A call's tokens are of one version if the policy had it when the call began and still has it once they are sampled. Only
the process that pushed weights knows at once; the others ask the ledger, whose version changes while the engines are
paused. An engine that says versions, though not in this reply (it was cut before its end), must have said this one
last: else somebody pushes to it behind rolltap's back, and what it sampled from is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from rolltap.contract.trainer import PolicyState
from rolltap.errors import StoreUnavailable
from rolltap.proxy.call.policies import Policies, Policy

ReadPolicies = Callable[[], Awaitable[Sequence[PolicyState]]]
"""The policies as the ledger has them."""


class Versions(Protocol):
    """Where a policy's version is asked for."""

    async def now(self, policy: Policy) -> int | None:
        """The version that `policy` has at some moment of this call; None if it can't be told."""
        ...

    async def behind(self, policy: Policy, version: int) -> bool:
        """Whether tokens of a call that began at `version` are surely of it, though their engine did not say so."""
        stated = version if not policy.weight_versions else policy.stated_version
        return stated == version == await self.now(policy)


class OwnVersions(Versions):
    """Of a proxy that nobody else pushes beside."""

    async def now(self, policy: Policy) -> int | None:
        return policy.version


class SharedVersions(Versions):
    """Of several proxies on one ledger: one reading of it serves all who asked before it began."""

    def __init__(self, policies: Policies, read: ReadPolicies) -> None:
        self._policies = policies
        self._read = read
        self._reading = asyncio.Lock()
        self._begun = 0
        self._done = 0

    async def now(self, policy: Policy) -> int | None:
        asked = self._begun
        async with self._reading:
            try:
                if self._done <= asked:
                    await self._learn()
            except StoreUnavailable:
                return None
        return policy.version

    async def _learn(self) -> None:
        self._begun += 1
        reading = self._begun
        states = {state.name: state.version for state in await self._read()}
        for policy in self._policies:
            policy.version = states.get(policy.name, policy.version)
        self._done = reading
