"""Keys of the planes: what each role may do, and the bodies that mint and rotate keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from rolltap.contract.base import RequestBody, Seconds
from rolltap.errors import Forbidden, InvalidRequest
from rolltap.tenants import DEFAULT_TENANT

Role = Literal["admin", "trainer", "evaluator", "runner", "viewer", "project"]

ROLES: dict[Role, str] = {
    "admin": "everything",
    "trainer": "leases, trajectories and weights, of named policies or of all",
    "evaluator": "appends rewards",
    "runner": "claims rollouts; starts, ends and rewards what it claimed itself",
    "viewer": "reads what the admin and trainer planes show",
    "project": "model calls, in sessions that open by themselves",
}

MINTED = "rt-key."
"""How minted keys begin. No session's key does: its random part has no dot."""

KEY_NAME = re.compile(r"[\w.:@/-]{1,64}")
MAX_OVERLAP_S = 30 * 86_400


def key_hash(key: str) -> str:
    """How a key is stored: hexadecimal SHA-256 (keys are 256 random bits, so no salt is needed)."""
    return hashlib.sha256(key.encode()).hexdigest()


MOST = 10**15
"""The largest budget: sums of it fit every store's integers."""


class KeyBudget(RequestBody, frozen=True):
    """What a project's key may use, all its sessions together; None: any amount. Its secrets share it.

    `tokens` are of prompts and outputs, `mb` of request bodies; `per_minute` are calls.
    """

    calls: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    tokens: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    mb: Annotated[float, Meta(gt=0, le=1e9)] | None = None
    per_minute: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


@dataclass(frozen=True, slots=True)
class KeyUsage:
    """What a project's key has used."""

    calls: int = 0
    tokens: int = 0
    body_bytes: int = 0

    def __add__(self, more: KeyUsage) -> KeyUsage:
        return KeyUsage(self.calls + more.calls, self.tokens + more.tokens, self.body_bytes + more.body_bytes)

    def __sub__(self, less: KeyUsage) -> KeyUsage:
        return KeyUsage(self.calls - less.calls, self.tokens - less.tokens, self.body_bytes - less.body_bytes)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request: the id and the rights of its key. `policies` None stands for all of them.

    `expires_at` is in seconds since the epoch, None for a key that does not expire.
    """

    id: str
    role: Role
    policies: frozenset[str] | None = None
    expires_at: float | None = None
    tenant: str = DEFAULT_TENANT
    budget: KeyBudget = field(default_factory=KeyBudget)

    @property
    def is_root(self) -> bool:
        """Whether its key is one of the settings, whose ids are their roles."""
        return self.id == self.role

    @property
    def of_deployment(self) -> bool:
        """Whether it is of the tenant whose admin keys make keys of others."""
        return self.tenant == DEFAULT_TENANT

    @property
    def only_own(self) -> bool:
        """Whether it may touch only what it claimed itself."""
        return self.role == "runner"

    def check_grants(self, tenant: str) -> None:
        """`Forbidden` unless it may make keys of `tenant`."""
        if tenant != self.tenant and not self.of_deployment:
            raise Forbidden(f"this key is of tenant {self.tenant!r}, and makes no key of another")

    def check_policies(self, policies: Sequence[str]) -> None:
        """`Forbidden` if one of `policies` is not this key's."""
        for policy in policies:
            if self.policies is not None and policy not in self.policies:
                own = ", ".join(sorted(self.policies))
                raise Forbidden(f"this key is not for policy {policy!r}; it is for {own}")


SERVER = Caller("server", "admin")
"""The server itself, for what no request asked for."""


class MintKey(RequestBody, frozen=True):
    """A new key. `ttl` is its life in seconds, None for no end; `policies` limit a trainer's key, `budget` a project's.

    `tenant` None: that of the key which mints it.
    """

    role: Role
    name: str
    ttl: Seconds | None = None
    policies: Sequence[str] | None = None
    tenant: str | None = None
    budget: KeyBudget | None = None

    def __post_init__(self) -> None:
        if not KEY_NAME.fullmatch(self.name):
            raise InvalidRequest("name: 1 to 64 letters, digits, . : @ / - _", param="name")
        if self.policies is not None and (self.role != "trainer" or not self.policies):
            raise InvalidRequest("policies: one or more, and for keys of role trainer only", param="policies")
        if self.budget is not None and self.role != "project":
            raise InvalidRequest("budget: for keys of role project only; others make no model calls", param="budget")


class RotateKey(RequestBody, frozen=True):
    """A new secret for a key; the old ones work for `overlap` seconds more. `ttl` gives the key a new end."""

    overlap: Annotated[float, Meta(ge=0, le=MAX_OVERLAP_S)] = 3600.0
    ttl: Seconds | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as it is listed. `minted_by` is the id of the key that made it; times as in `Caller`.

    `used` is what the store knows; proxies add to it every second or so.
    """

    id: str
    name: str
    role: Role
    policies: tuple[str, ...] | None
    minted_by: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    tenant: str
    budget: KeyBudget
    used: KeyUsage
    secrets: int = field(default=1)  # that work: 2 while a rotation overlaps


@dataclass(frozen=True, slots=True)
class MintedKey:
    """`key` is in this answer and nowhere else."""

    record: KeyRecord
    key: str


@dataclass(frozen=True, slots=True)
class KeyList:
    """The minted keys, newest first."""

    keys: Sequence[KeyRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWithSecret(KeyRecord):
    """A key's record with its secret, `key`, which no other answer contains."""

    key: str


@dataclass(frozen=True, slots=True)
class RevokedKeys:
    """The ids of the revoked keys."""

    revoked: Sequence[str]


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """`at` is in seconds since the epoch by the database's clock; `action` is a route, or a command's name."""

    seq: int
    at: float
    key_id: str
    role: str
    action: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Audit entries, newest first."""

    entries: Sequence[AuditEntry]
