"""A server's engines as its run pages show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rolltap.proxy.call.policies import Policies
from rolltap.proxy.call.policy import Policy
from rolltap.proxy.engines.pool import EnginePool, Replica
from rolltap.proxy.viewer.run import EngineLine


def engines_of(policies: Policies) -> Callable[[str], Sequence[EngineLine]]:
    """Returns a function that lists a policy's engine or its replicas now; empty if the policy is not served."""

    def lines(name: str) -> list[EngineLine]:
        if name not in policies.names:
            return []
        policy = policies[name]
        if isinstance(policy.engine, EnginePool):
            return [_replica(policy, replica) for replica in policy.engine.replicas]
        return [EngineLine(policy.engine.name, "serving" if policy.up else "not up", policy.stated_version)]

    return lines


def _replica(policy: Policy, replica: Replica) -> EngineLine:
    state = "ejected" if replica.ejected else "paused" if replica.paused else "serving" if policy.up else "not up"
    version = replica.sent_version if replica.sent_version is not None else policy.stated_version
    return EngineLine(replica.engine.name, state, version)
