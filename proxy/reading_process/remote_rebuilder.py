"""The ledger's `Rebuilder`, with the work done in the reading process."""

from __future__ import annotations

from rolltap import wire
from rolltap.contract.leases import Lease
from rolltap.contract.trainer import LeaseRequest
from rolltap.decoding import from_json
from rolltap.ledger.rebuilding import BrokenGroups, LocalRebuilder, OpenedLease, TrainedVersions
from rolltap.proxy.reading_process.asking import Answer, AskRecord


class RemoteRebuilder:
    """See `rolltap.ledger.rebuilding`."""

    def __init__(self, ask: AskRecord) -> None:
        self._ask = ask

    async def trained_versions(self, session_id: str) -> TrainedVersions:
        answer = await self._ask(LocalRebuilder.trained_versions, session_id)
        return from_json(await answer.read(), TrainedVersions)

    async def lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Lease | BrokenGroups:
        lease = await self.packed_lease(request, opened, opened_at)
        return lease if isinstance(lease, BrokenGroups) else wire.unpack(await lease.read(), Lease)

    async def packed_lease(self, request: LeaseRequest, opened: OpenedLease, opened_at: float) -> Answer | BrokenGroups:
        """Returns the lease as `rolltap.wire` packs it: this process only passes it on."""
        answer = await self._ask(LocalRebuilder.lease, request, opened, opened_at)
        if answer.media_type == wire.CONTENT_TYPE:
            return answer
        return from_json(await answer.read(), BrokenGroups)
