"""The trainer plane's requests and replies, without any input or output.

Both clients build their requests here. Bodies and replies are `rolltap.contract.trainer`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from rolltap import wire
from rolltap.contract.base import values_of
from rolltap.contract.leases import Lease
from rolltap.contract.trainer import (
    AckLease,
    BeginUpdate,
    ExtendLease,
    LeaseOptions,
    LeaseRequest,
    NackLease,
    PauseMode,
    PolicyState,
    PushWeights,
    ReleaseLease,
    Rewind,
    Rewound,
    Transfer,
)
from rolltap.http_client import Request, read_json

T = TypeVar("T")


def lease(trainer: str, policy: str, groups: int, options: LeaseOptions) -> Request[Lease | None]:
    chosen = {**values_of(options), "at_least": min(options.at_least or groups, groups)}
    request = LeaseRequest(trainer, policy, groups, **chosen)
    return Request("POST", "/leases", values_of(request), parse=_lease, wait=options.wait)


def extend(leased: Lease, ttl: float) -> Request[float]:
    return Request(
        "POST", f"/leases/{leased.id}/extend", ExtendLease(leased.token, ttl), parse=_field("expires_in", float)
    )


def ack(leased: Lease, step: int) -> Request[int]:
    return Request("POST", f"/leases/{leased.id}/ack", AckLease(leased.token, step), parse=_field("groups", int))


def nack(leased: Lease, reason: str, blamed: tuple[str, ...]) -> Request[int]:
    body = NackLease(leased.token, reason, blamed)
    return Request("POST", f"/leases/{leased.id}/nack", body, parse=_field("dead", int))


def release(leased: Lease) -> Request[None]:
    return Request("POST", f"/leases/{leased.id}/release", ReleaseLease(leased.token), parse=_nothing)


def rewind(trainer: str, step: int, versions: Mapping[str, int]) -> Request[Rewound]:
    path = f"/trainers/{quote(trainer, safe='')}/rewind"
    return Request("POST", path, Rewind(step, dict(versions)), parse=_reply(Rewound))


def policy(name: str) -> Request[PolicyState]:
    return Request("GET", _path(name), parse=_reply(PolicyState))


def begin_update(name: str, mode: PauseMode) -> Request[None]:
    return Request("POST", _path(name, "/begin_update"), BeginUpdate(mode), parse=_nothing)


def push(name: str, weights: PushWeights) -> Request[None]:
    return Request("POST", _path(name, "/push"), weights, parse=_nothing)


def ranks(name: str) -> Request[int]:
    return Request("GET", _path(name, "/ranks"), parse=_field("ranks", int))


def receive(name: str, transfer: Transfer) -> Request[None]:
    return Request("POST", _path(name, "/receive"), transfer, parse=_nothing, wait=transfer.timeout_s, once=True)


def finish_update(name: str) -> Request[None]:
    return Request("POST", _path(name, "/finish_update"), {}, parse=_nothing)


def _path(name: str, rest: str = "") -> str:
    return f"/policies/{quote(name, safe='')}{rest}"


def _lease(body: bytes) -> Lease | None:
    return wire.unpack(body, Lease) if body else None


def _reply(kind: type[T]) -> Callable[[bytes], T]:
    return lambda body: msgspec.json.decode(body, type=kind)


def _field(name: str, kind: Callable[[Any], T]) -> Callable[[bytes], T]:
    return lambda body: kind(read_json(body)[name])


def _nothing(_: bytes) -> None:
    return None
