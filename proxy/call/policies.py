"""The served policies, by the names that lead to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rolltap.contract.tags import CAPTURED, MAX_ROLES, ROLE_NAME, roles_of
from rolltap.errors import InvalidRequest, NotFound
from rolltap.proxy.call.policy import Policy
from rolltap.tenants import DEFAULT_TENANT, current_tenant
from rolltap.types import Session

ANY_MODEL = "*"
"""An alias that matches every model name."""


class Policies:
    """The served policies, by name and by the model names that lead to them.

    All lookups see only the policies of the current tenant. `all` holds the policies of every tenant.
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
        """The tenants that have policies, and the default tenant."""
        return sorted(self._of_tenant)

    def check_tenant(self, tenant: str) -> None:
        """Raises `InvalidRequest` for a tenant without policies: its keys would be useless."""
        if tenant not in self._of_tenant:
            known = ", ".join(self.tenants)
            message = f"no policy belongs to tenant {tenant[:80]!r}; known: {known} (setting policies.NAME.tenant)"
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
        """The policy for a request of `session` that asks for `model`: a role, a policy or an alias."""
        if (policy := roles_of(session).get(model)) is not None:
            return self[policy]
        return self.resolve(model, session.policy, captured=CAPTURED in session.tags)

    def resolve(self, model: str, bound: str, *, captured: bool = False) -> Policy:
        """The policy for a request that asks for `model` in a session bound to policy `bound`.

        Only a trainable policy's own sessions may call it; any session may call a frozen policy. In a captured session
        an unknown name leads to the bound policy, as the harness cannot know which models are served.
        """
        reached = [policy for policy in self if policy.name == bound or not policy.settings.trainable]
        if (policy := named(model, reached)) is not None:
            return policy
        if captured:
            return self[bound]
        served = ", ".join(self.served(bound))
        raise NotFound(f"the model {model!r} is not served here; served: {served}", param="model")

    def for_model(self, model: str) -> str:
        """The policy that a captured session for `model` is bound to: that of this name or alias, or else the first."""
        policy = named(model, list(self))
        if policy is None and not self._own:
            raise NotFound("this tenant has no policy", param="model")
        return policy.name if policy is not None else next(iter(self._own))

    def trained(self, roles: Mapping[str, str]) -> Sequence[str]:
        """The policies that a rollout with these policies by role trains: the trainable ones, in the order of their
        first roles; without any the first policy, whose group it is.

        Raises `InvalidRequest` for invalid roles.
        """
        if not 1 <= len(roles) <= MAX_ROLES:
            raise InvalidRequest(f"policy: name 1 to {MAX_ROLES} roles, not {len(roles)}", param="policy")
        for role, name in roles.items():
            if not ROLE_NAME.fullmatch(role):
                message = f"policy: invalid role name {role!r}: use letters, digits, . : / - _"
                raise InvalidRequest(message, param="policy")
            if name not in self.names:
                known = ", ".join(self.names)
                raise InvalidRequest(f"policy: role {role!r}: no policy {name!r}; served: {known}", param="policy")
        trainable = self.trainable_in(roles.values())
        by_weights: dict[tuple[str, str], str] = {}
        for name in trainable:
            served = self[name].settings
            if (other := by_weights.setdefault((served.engine, served.model or name), name)) != name:
                raise InvalidRequest(
                    f"policy: {other} and {name} are both trained, but engine {served.engine!r} serves them as one "
                    "model, so that one's weights would replace the other's: give each an engine, or an adapter's name "
                    f"as policies.{name}.model",
                    param="policy",
                )
        return trainable or [next(iter(roles.values()))]

    def trainable_in(self, names: Iterable[str]) -> list[str]:
        """The trainable ones of the policies, each once. Those that are served no more are left out."""
        return [name for name in dict.fromkeys(names) if name in self and self[name].settings.trainable]

    def served(self, bound: str) -> list[str]:
        """The model names that a session bound to policy `bound` may ask for."""
        own = self[bound]
        frozen = [policy for policy in self if not policy.settings.trainable and policy is not own]
        names = [name for policy in (own, *frozen) for name in (policy.name, *policy.settings.aliases)]
        return [name for name in names if name != ANY_MODEL]


def named(model: str, policies: Sequence[Policy]) -> Policy | None:
    """The first policy with the name or alias `model`, or else the first with the alias `*`."""
    for name in (model, ANY_MODEL):
        for policy in policies:
            if name == policy.name or name in policy.settings.aliases:
                return policy
    return None
