"""Leases on the trainer plane: whole groups out, acknowledgements in. A lease is a `rolltap.wire` payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rolltap.contract.keys import Caller
from rolltap.contract.planes import LeasePlane
from rolltap.contract.trainer import (
    AckLease,
    AnnotateLease,
    DeadLetterList,
    ExtendLease,
    GroupRevived,
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
from rolltap.proxy.planes.policies import policy_of
from rolltap.proxy.planes.services import Services
from rolltap.proxy.reading_process.questions import RemoteRebuilder


@dataclass(frozen=True, slots=True)
class LeaseRoutes(LeasePlane):
    by: Caller
    services: Services

    async def lease(self, body: LeaseRequest) -> Any:
        policy_of(self.services, body.policy)
        packed = RemoteRebuilder(self.services.ask).packed_lease
        lease = await self.services.ledger.trainers.built(body, packed)
        return lease and lease.response()

    async def extend(self, lease_id: str, body: ExtendLease) -> LeaseExtended:
        return LeaseExtended(await self.services.ledger.trainers.extend(_key(lease_id, body), body.ttl))

    async def acknowledge(self, lease_id: str, body: AckLease) -> LeaseAcknowledged:
        return LeaseAcknowledged(await self.services.ledger.trainers.acknowledge(_key(lease_id, body), body.step))

    async def refuse(self, lease_id: str, body: NackLease) -> LeaseRefused:
        key = _key(lease_id, body)
        return LeaseRefused(await self.services.ledger.trainers.refuse(key, body.reason, body.blamed))

    async def release(self, lease_id: str, body: ReleaseLease) -> LeaseReleased:
        await self.services.ledger.trainers.release(_key(lease_id, body))
        return LeaseReleased(lease_id)

    async def annotate(self, lease_id: str, body: AnnotateLease) -> LeaseAnnotated:
        policy, added = await self.services.ledger.trainers.annotate(_key(lease_id, body), body)
        self.services.recorder.metrics.annotated(policy, added)
        return LeaseAnnotated(len(added))

    async def rewind(self, name: str, body: Rewind) -> Rewound:
        rewound = await self.services.ledger.trainers.rewind(name, body)
        for policy in set(body.versions).intersection(self.services.policies.names):
            self.services.policies[policy].owned = True
        return rewound

    async def dead_letters(self, policy: str | None = None, limit: int = 100) -> DeadLetterList:
        return DeadLetterList(await self.services.ledger.groups.dead_letters(policy, min(limit, 1000)))

    async def revive(self, group_id: str) -> GroupRevived:
        await self.services.ledger.groups.revive(group_id)
        return GroupRevived(group_id)


def _key(lease_id: str, body: ExtendLease | AckLease | NackLease | ReleaseLease | AnnotateLease) -> LeaseKey:
    return LeaseKey(lease_id, body.token, body.incarnation)
