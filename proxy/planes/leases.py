"""Leases on the trainer plane: whole groups out, acknowledgements in. A lease is a `rolltap.wire` payload."""

from __future__ import annotations

from typing import Any

from rolltap.contract import trainer
from rolltap.contract.planes import LeasePlane
from rolltap.ledger.leases import LeaseKey
from rolltap.proxy.planes.policies import policy_of
from rolltap.proxy.planes.services import Routes
from rolltap.proxy.reading_process.questions import RemoteRebuilder

OfLease = trainer.ExtendLease | trainer.AckLease | trainer.NackLease | trainer.ReleaseLease | trainer.AnnotateLease


class LeaseRoutes(Routes, LeasePlane):
    async def lease(self, body: trainer.LeaseRequest) -> Any:
        policy_of(self.services, body.policy)
        packed = RemoteRebuilder(self.services.ask).packed_lease
        lease = await self.services.ledger.trainers.built(body, packed)
        return lease and lease.response()

    async def extend(self, lease_id: str, body: trainer.ExtendLease) -> trainer.LeaseExtended:
        return trainer.LeaseExtended(await self.services.ledger.trainers.extend(_key(lease_id, body), body.ttl))

    async def acknowledge(self, lease_id: str, body: trainer.AckLease) -> trainer.LeaseAcknowledged:
        return trainer.LeaseAcknowledged(
            await self.services.ledger.trainers.acknowledge(_key(lease_id, body), body.step)
        )

    async def refuse(self, lease_id: str, body: trainer.NackLease) -> trainer.LeaseRefused:
        key = _key(lease_id, body)
        return trainer.LeaseRefused(await self.services.ledger.trainers.refuse(key, body.reason, body.blamed))

    async def release(self, lease_id: str, body: trainer.ReleaseLease) -> trainer.LeaseReleased:
        await self.services.ledger.trainers.release(_key(lease_id, body))
        return trainer.LeaseReleased(lease_id)

    async def annotate(self, lease_id: str, body: trainer.AnnotateLease) -> trainer.LeaseAnnotated:
        policy, added = await self.services.ledger.trainers.annotate(_key(lease_id, body), body)
        self.services.recorder.metrics.annotated(policy, added)
        return trainer.LeaseAnnotated(len(added))

    async def trainer(self, name: str) -> trainer.TrainerStatus:
        return await self.services.ledger.trainers.status(name)

    async def rewind(self, name: str, body: trainer.Rewind) -> trainer.Rewound:
        rewound = await self.services.ledger.trainers.rewind(name, body)
        for policy in set(body.versions).intersection(self.services.policies.names):
            self.services.policies[policy].owned = True
        return rewound

    async def dead_letters(self, policy: str | None = None, limit: int = 100) -> trainer.DeadLetterList:
        return trainer.DeadLetterList(await self.services.ledger.groups.dead_letters(policy, min(limit, 1000)))

    async def revive(self, group_id: str) -> trainer.GroupRevived:
        await self.services.ledger.groups.revive(group_id)
        return trainer.GroupRevived(group_id)


def _key(lease_id: str, body: OfLease) -> LeaseKey:
    return LeaseKey(lease_id, body.token, body.incarnation)
