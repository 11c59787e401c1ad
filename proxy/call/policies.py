"""The served policies: a name, its settings, its engine, its source of replies, and the version of its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rolltap.errors import EngineTimeout, EngineUnavailable, InvalidRequest, NotFound, RolltapError
from rolltap.proxy.call.sources.base import Source
from rolltap.proxy.engines.base import EngineFacts, ServedEngine
from rolltap.proxy.engines.pool import FAILURES
from rolltap.proxy.sessions.capture import CAPTURED
from rolltap.proxy.sessions.roles import roles_of
from rolltap.settings import PolicySettings
from rolltap.tenants import DEFAULT_TENANT, current_tenant
from rolltap.types import Session

ANY_MODEL = "*"
"""An alias that stands for every model name."""


@dataclass(slots=True, eq=False)
class Policy:
    """A served policy. `version` is that of tokens sampled from now on, where the engine does not say it itself."""

    name: str
    settings: PolicySettings
    engine: ServedEngine
    source: Source
    version: int = 0
    logprobs_mode: str = "unknown"
    weight_versions: bool = False  # the engine says every token's version
    states_weights: bool = False  # the engine says which version it serves, when asked
    stated_version: int | None = None  # that the engine said last
    up: bool = False  # the engine answered the last probe
    lacks_model: bool = False  # the engine did not list the policy's model then, and has served no call since
    failures: int = 0  # calls in a row that the engine did not answer
    doubted: asyncio.Event = field(default_factory=asyncio.Event)  # the engine is to be probed

    def learn(self, facts: EngineFacts) -> None:
        """Takes over what the engine said of itself."""
        self.logprobs_mode = facts.logprobs_mode
        self.weight_versions = facts.weight_versions
        self.states_weights = facts.states_weights
        self.source.learn(facts)
        self.up, self.failures = True, 0
        self.doubted.clear()

    def served(self) -> None:
        """A call had its whole reply."""
        self.failures = 0
        self.lacks_model = False

    def failed(self, error: RolltapError) -> None:
        """A call ended in `error`; after `FAILURES` in a row without an answer the engine is probed."""
        if isinstance(error, (EngineUnavailable, EngineTimeout)):
            self.failures += 1
            if self.failures >= FAILURES:
                self.doubted.set()

    def lose(self) -> None:
        """A probe had no answer."""
        self.up = False
        self.doubted.set()


class Policies:
    """The served policies by name, and the model names that lead to them.

    A task sees those of the tenant that it acts for; only `all` are every tenant's.
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.all = tuple(policies.values())
        self._of_tenant: dict[str, dict[str, Policy]] = {DEFAULT_TENANT: {}}
        for name, policy in policies.items():
            self._of_tenant.setdefault(policy.settings.tenant, {})[name] = policy

    @property
    def _own(self) -> Mapping[str, Policy]:
        return self._of_tenant.get(current_tenant(), {})

    @property
    def tenants(self) -> list[str]:
        """The tenants that have policies, and the default one."""
        return sorted(self._of_tenant)

    def check_tenant(self, tenant: str) -> None:
        """`InvalidRequest` for a tenant that has no policy: nothing could be done with a key of it."""
        if tenant not in self._of_tenant:
            known = ", ".join(self.tenants)
            message = f"no policy of the settings is of tenant {tenant[:80]!r}; known: {known} (policies.NAME.tenant)"
            raise InvalidRequest(f"tenant: {message}", param="tenant")

    def __getitem__(self, name: str) -> Policy:
        try:
            return self._own[name]
        except KeyError:
            raise NotFound(f"no policy {name!r}; served: {', '.join(self._own)}", param="policy") from None

    def __contains__(self, name: object) -> bool:
        return name in self._own

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._own.values())

    @property
    def names(self) -> list[str]:
        return list(self._own)

    def of_session(self, session: Session, model: str) -> Policy:
        """The policy for a request of `session` that asks for `model`, which may be the name of a role."""
        if (policy := roles_of(session).get(model)) is not None:
            return self[policy]
        return self.resolve(model, session.policy, captured=CAPTURED in session.tags)

    def resolve(self, model: str, bound: str, *, captured: bool = False) -> Policy:
        """The policy for a request that asks for `model` in a session bound to policy `bound`.

        A trainable policy is reached only by its own sessions; frozen ones by any. In a captured session every name
        leads to the bound policy: the harness was not told which models are served.
        """
        reached = [policy for policy in self if policy.name == bound or not policy.settings.trainable]
        if (policy := named(model, reached)) is not None:
            return policy
        if captured:
            return self[bound]
        served = ", ".join(self.served(bound))
        raise NotFound(f"the model {model!r} is not served here; served: {served}", param="model")

    def for_model(self, model: str) -> str:
        """The policy that a captured session for `model` is bound to: the one of that name or alias, else the first."""
        policy = named(model, list(self))
        if policy is None and not self._own:
            raise NotFound("this tenant has no policy", param="model")
        return policy.name if policy is not None else next(iter(self._own))

    def served(self, bound: str) -> list[str]:
        """The model names that a session of policy `bound` may ask for."""
        own = self[bound]
        frozen = [policy for policy in self if not policy.settings.trainable and policy is not own]
        names = [name for policy in (own, *frozen) for name in (policy.name, *policy.settings.aliases)]
        return [name for name in names if name != ANY_MODEL]


def named(model: str, policies: Sequence[Policy]) -> Policy | None:
    """The policy that `model` names, or else one that answers to any name; the first of them."""
    for name in (model, ANY_MODEL):
        for policy in policies:
            if name == policy.name or name in policy.settings.aliases:
                return policy
    return None
