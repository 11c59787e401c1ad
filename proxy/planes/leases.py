"""Leases on the trainer plane: whole groups out, acknowledgements in. A lease is a `rolltap.wire` payload."""

from __future__ import annotations

from fastapi import Response

from rolltap.contract.trainer import (
    AckLease,
    AnnotateLease,
    ExtendLease,
    LeaseAcknowledged,
    LeaseAnnotated,
    LeaseExtended,
    LeaseRefused,
    LeaseReleased,
    LeaseRequest,
    NackLease,
    ReleaseLease,
    Rewind,
    Rewound,
)
from rolltap.ledger.leases import LeaseKey
from rolltap.proxy.planes.answers import DeadLetterList, GroupRevived, packed
from rolltap.proxy.planes.bodies import Limit
from rolltap.proxy.planes.policies import policy_of
from rolltap.proxy.planes.router import PlaneRouter
from rolltap.proxy.planes.services import Services
from rolltap.proxy.reading_process.questions import RemoteRebuilder

LEASE = packed("a `Lease`") | {204: {"description": "no group was ready within `wait` seconds"}}


def router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["leases"])
    trainers, packed = services.ledger.trainers, RemoteRebuilder(services.ask).packed_lease

    @routes.post("/leases", response_class=Response, responses=LEASE)
    async def lease(body: LeaseRequest) -> Response:
        """Leases up to `groups` whole groups as soon as `at_least` are ready. 204 if none is within `wait` seconds.

        The policy must be served here: its settings say which calls carry loss.
        """
        policy_of(services, body.policy)
        lease = await trainers.built(body, packed)
        return Response(status_code=204) if lease is None else lease.response()

    @routes.post("/leases/{lease_id}/extend")
    async def extend(lease_id: str, body: ExtendLease) -> LeaseExtended:
        return LeaseExtended(await trainers.extend(_key(lease_id, body), body.ttl))

    @routes.post("/leases/{lease_id}/ack")
    async def acknowledge(lease_id: str, body: AckLease) -> LeaseAcknowledged:
        return LeaseAcknowledged(await trainers.acknowledge(_key(lease_id, body), body.step))

    @routes.post("/leases/{lease_id}/nack")
    async def refuse(lease_id: str, body: NackLease) -> LeaseRefused:
        return LeaseRefused(await trainers.refuse(_key(lease_id, body), body.reason, body.blamed))

    @routes.post("/leases/{lease_id}/release")
    async def release(lease_id: str, body: ReleaseLease) -> LeaseReleased:
        await trainers.release(_key(lease_id, body))
        return LeaseReleased(lease_id)

    @routes.post("/leases/{lease_id}/annotations")
    async def annotate(lease_id: str, body: AnnotateLease) -> LeaseAnnotated:
        """Stores the trainer's annotations of the lease's sampled tokens. `added` counts calls that had none before."""
        policy, added = await trainers.annotate(_key(lease_id, body), body)
        services.recorder.metrics.annotated(policy, added)
        return LeaseAnnotated(len(added))

    @routes.post("/trainers/{name}/rewind")
    async def rewind(name: str, body: Rewind) -> Rewound:
        rewound = await trainers.rewind(name, body)
        for policy in set(body.versions).intersection(services.policies.names):
            services.policies[policy].owned = True
        return rewound

    @routes.get("/dead-letters")
    async def dead_letters(policy: str | None = None, limit: Limit = 100) -> DeadLetterList:
        return DeadLetterList(await services.ledger.groups.dead_letters(policy, min(limit, 1000)))

    @routes.post("/dead-letters/{group_id}/revive")
    async def revive(group_id: str) -> GroupRevived:
        await services.ledger.groups.revive(group_id)
        return GroupRevived(group_id)

    return routes


def _key(lease_id: str, body: ExtendLease | AckLease | NackLease | ReleaseLease | AnnotateLease) -> LeaseKey:
    return LeaseKey(lease_id, body.token, body.incarnation)
