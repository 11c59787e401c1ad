"""The trainer plane's requests and replies, without I/O: both clients build their requests here.

The types of bodies and replies are in `rolltap.contract.trainer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict
from urllib.parse import quote

from rolltap.contract.base import values_of
from rolltap.contract.control import PolicyStatus, RolloutControl, SetControl
from rolltap.contract.request import Request, no_content, read_as
from rolltap.contract.trainer import (
    MAX_CALLS,
    MAX_TOKENS,
    AckLease,
    AnnotateLease,
    BeginUpdate,
    CallAnnotation,
    EngineRanks,
    ExtendLease,
    FinishUpdate,
    Lease,
    LeaseAcknowledged,
    LeaseAnnotated,
    LeaseExtended,
    LeaseOptions,
    LeaseRefused,
    LeaseRequest,
    LeavePolicy,
    NackLease,
    PauseMode,
    PolicyScores,
    PushWeights,
    ReleaseLease,
    Rewind,
    Rewound,
    ScoreIds,
    Transfer,
)
from rolltap.wire import unpack


class TrainerCaller(TypedDict):
    """The caller: a trainer, and the incarnation that its last rewind returned."""

    trainer: str
    incarnation: int


def lease(by: TrainerCaller, policy: str, groups: int, options: LeaseOptions) -> Request[Lease | None]:
    fields = {**values_of(options), "at_least": min(options.at_least or groups, groups)}
    request = LeaseRequest(by["trainer"], policy, groups, incarnation=by["incarnation"], **fields)
    return Request("POST", "/leases", values_of(request), parse=_lease, wait=options.wait)


def extend(by: TrainerCaller, leased: Lease, ttl: float) -> Request[LeaseExtended]:
    body = ExtendLease(leased.token, ttl, by["incarnation"])
    return Request("POST", f"/leases/{leased.id}/extend", body, parse=read_as(LeaseExtended))


def ack(by: TrainerCaller, leased: Lease, step: int) -> Request[LeaseAcknowledged]:
    body = AckLease(leased.token, step, by["incarnation"])
    return Request("POST", f"/leases/{leased.id}/ack", body, parse=read_as(LeaseAcknowledged))


def nack(by: TrainerCaller, leased: Lease, reason: str, blamed: tuple[str, ...]) -> Request[LeaseRefused]:
    body = NackLease(leased.token, reason, blamed, by["incarnation"])
    return Request("POST", f"/leases/{leased.id}/nack", body, parse=read_as(LeaseRefused))


def release(by: TrainerCaller, leased: Lease) -> Request[None]:
    body = ReleaseLease(leased.token, by["incarnation"])
    return Request("POST", f"/leases/{leased.id}/release", body, parse=no_content)


def annotate(
    by: TrainerCaller, leased: Lease, version: int, calls: Sequence[CallAnnotation]
) -> list[Request[LeaseAnnotated]]:
    """The requests that annotate `calls`, split by size; the server takes each one whole or not at all."""
    parts: list[list[CallAnnotation]] = []
    room = 0
    for call in calls:
        if call.tokens > room or len(parts[-1]) == MAX_CALLS:
            parts.append([])
            room = MAX_TOKENS
        parts[-1].append(call)
        room -= call.tokens
    path, incarnation = f"/leases/{leased.id}/annotations", by["incarnation"]
    bodies = (AnnotateLease(leased.token, version, tuple(part), incarnation) for part in parts)
    return [Request("POST", path, body, parse=read_as(LeaseAnnotated)) for body in bodies]


def rewind(trainer: str, restored: Rewind) -> Request[Rewound]:
    return Request("POST", f"/trainers/{quote(trainer, safe='')}/rewind", restored, parse=read_as(Rewound))


def policy(name: str) -> Request[PolicyStatus]:
    return Request("GET", _path(name), parse=read_as(PolicyStatus))


def begin_update(by: TrainerCaller, name: str, mode: PauseMode) -> Request[None]:
    return Request("POST", _path(name, "/begin_update"), BeginUpdate(mode, **by), parse=no_content)


def push(name: str, weights: PushWeights) -> Request[None]:
    return Request("POST", _path(name, "/push"), weights, parse=no_content)


def set_control(by: TrainerCaller, name: str, control: RolloutControl) -> Request[None]:
    return Request("POST", _path(name, "/control"), SetControl(control=control, **by), parse=no_content)


def score(name: str, body: ScoreIds) -> Request[PolicyScores]:
    return Request("POST", _path(name, "/score"), body, parse=read_as(PolicyScores))


def ranks(name: str) -> Request[EngineRanks]:
    return Request("GET", _path(name, "/ranks"), parse=read_as(EngineRanks))


def receive(name: str, transfer: Transfer) -> Request[None]:
    return Request("POST", _path(name, "/receive"), transfer, parse=no_content, wait=transfer.timeout_s, once=True)


def finish_update(by: TrainerCaller, name: str) -> Request[None]:
    return Request("POST", _path(name, "/finish_update"), FinishUpdate(**by), parse=no_content)


def leave(by: TrainerCaller, name: str) -> Request[None]:
    return Request("POST", _path(name, "/leave"), LeavePolicy(**by), parse=no_content)


def _path(name: str, rest: str = "") -> str:
    return f"/policies/{quote(name, safe='')}{rest}"


def _lease(body: bytes) -> Lease | None:
    return unpack(body, Lease) if body else None
