"""The ledger: tasks, groups, rollouts, rewards, leases and policy versions.

`Ledger` combines its parts. Each part can be read by itself:

* `groups`, `rollouts`, `rewards`: the rollout side. Groups are opened, each rollout reaches one terminal state, rewards
  are appended. A group's rule decides when it is complete (`rolltap.ledger.rules`).
* `submissions`, `nodes`: queued tasks (`rolltap.ledger.task_queue`), and the machines that run them.
* `trainers`: leases on whole groups (`rolltap.ledger.open_leases`, `rolltap.ledger.leases`, `rolltap.ledger.replay`).
* `policies`: weight versions and backpressure.
* `controls`: what trainers set for the rollouts to come.
* `events`: the log of changes.
* `keys`, `audit`: permissions, and the log of their use.
* `tampering`: forbidden actions that agents tried.

It does not depend on the proxy or the reconstructor. It gets an object that rebuilds trajectories
(`rolltap.ledger.rebuilding`) and a function that closes a session.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from rolltap.calllog.database import Database, database_clock
from rolltap.errors import StoreError
from rolltap.ledger.audit import Audit
from rolltap.ledger.base import CloseSession, LatePeers, LedgerSettings, no_late_peers
from rolltap.ledger.controls import Controls
from rolltap.ledger.counts import LedgerCounts, count
from rolltap.ledger.events import Events
from rolltap.ledger.groups import Groups
from rolltap.ledger.keys import Keys
from rolltap.ledger.nodes import Nodes
from rolltap.ledger.open_leases import expire
from rolltap.ledger.policies import PolicyVersions
from rolltap.ledger.rebuilding import Rebuilder
from rolltap.ledger.rewards import Rewards
from rolltap.ledger.rollouts import Rollouts
from rolltap.ledger.submissions import Submissions
from rolltap.ledger.tampering import Tampering
from rolltap.ledger.trainers import Trainers
from rolltap.ledger.unit_of_work import BULK_WITHIN_S, Clock, UnitOfWork
from rolltap.tenants import DEFAULT_TENANT, acting_for

log = logging.getLogger("rolltap.ledger")

SWEEP_S = 1.0


class Ledger:
    """The ledger on a started database with the tables of `rolltap.ledger.schema`.

    Every operation acts for the current tenant. `sweep` covers `tenants`.
    """

    def __init__(
        self,
        database: Database,
        *,
        rebuilder: Rebuilder,
        close_session: CloseSession,
        settings: LedgerSettings | None = None,
        clock: Clock = database_clock,
        tenants: Sequence[str] = (DEFAULT_TENANT,),
        late_peers: LatePeers = no_late_peers,
    ) -> None:
        self._tenants = tenants
        self.settings = settings or LedgerSettings()
        self._uow = UnitOfWork(
            database,
            rebuilder=rebuilder,
            close_session=close_session,
            settings=self.settings,
            clock=clock,
            late_peers=late_peers,
        )
        self.groups = Groups(self._uow)
        self.rollouts = Rollouts(self._uow)
        self.rewards = Rewards(self._uow)
        self.submissions = Submissions(self._uow)
        self.nodes = Nodes(self._uow)
        self.controls = Controls(self._uow)
        self.trainers = Trainers(self._uow)
        self.policies = PolicyVersions(self._uow)
        self.events = Events(self._uow)
        self.keys = Keys(self._uow)
        self.audit = Audit(self._uow)
        self.tampering = Tampering(self._uow)

    async def sweep(self) -> None:
        """Ends expired leases and claims and settles groups after their deadline, for each tenant."""
        for tenant in self._tenants:
            with acting_for(tenant):
                await self._uow.transact(expire, within_s=BULK_WITHIN_S)
                await self.nodes.expire()
                while await self.groups.settle_late():
                    pass

    async def counts(self) -> LedgerCounts:
        """The current counts of queued tasks, leases and nodes."""
        return await self._uow.query(count)

    @asynccontextmanager
    async def sweeping(self, every: float = SWEEP_S) -> AsyncIterator[None]:
        """Sweeps every `every` seconds inside the context. Continues when the store was unavailable."""

        async def run() -> None:
            while True:
                await asyncio.sleep(every)
                try:
                    await self.sweep()
                except StoreError as error:
                    log.warning("cannot sweep the ledger: %s", error.message)
                except Exception:  # a boundary: leases and claims must expire also after a defect
                    log.exception("cannot sweep the ledger")

        task = asyncio.create_task(run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
