"""The node agent: claims rollouts in the ledger over HTTP and runs them on this machine.

There is one per machine, started by `rolltap node`, by Ray, by a Kubernetes Job or a Slurm array. All state is in the
ledger. The node sends heartbeats. When it dies, its claims expire and other nodes claim its rollouts as new attempts
with new keys. If a heartbeat's reply shows that the node has lost a claim, the node kills that run and reports nothing
more about it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from rolltap.contract.admin import FinishRollout
from rolltap.errors import RolltapError
from rolltap.harnesses.client import AdminClient, ClaimedRollout, ClaimedTask
from rolltap.harnesses.runner.attempts import DEFAULT_SLOTS, Progress, Slots
from rolltap.harnesses.runner.lifecycle import RolloutRunner
from rolltap.harnesses.runner.specs import Defaults, build
from rolltap.types import Cause, RolloutStatus

log = logging.getLogger("rolltap.node")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """`ttl`: seconds after the last heartbeat until claims expire. `wait`: seconds that a request waits for work.

    With `submission` the node runs only that submission's rollouts.
    """

    name: str
    slots: Slots = DEFAULT_SLOTS
    ttl: float = 15.0
    wait: float = 5.0
    submission: str | None = None


class NodeAgent:
    """Runs until `stop` is set or, with `until_idle`, until there is no work and no running rollout."""

    def __init__(
        self,
        client: AdminClient,
        settings: NodeSettings,
        defaults: Defaults,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._defaults = defaults
        self._runner = RolloutRunner(client, settings.slots, name=settings.name, progress=progress)
        self._running: dict[ClaimedRollout, asyncio.Task[object]] = {}
        self._changed = asyncio.Event()

    async def run(self, stop: asyncio.Event, *, until_idle: bool = False) -> None:
        beating = asyncio.create_task(self._beat())
        stopping = asyncio.create_task(stop.wait())
        try:
            while not stop.is_set():
                claiming = asyncio.create_task(self._claim())
                await asyncio.wait({claiming, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not claiming.done():
                    claiming.cancel()
                    with suppress(asyncio.CancelledError):
                        await claiming
                elif until_idle and not claiming.result() and not self._running and not await self._has_work():
                    break
        finally:
            stopping.cancel()
            await asyncio.shield(self._leave(beating))

    async def _has_work(self) -> bool:
        try:
            return await self._client.has_work()
        except RolltapError as error:
            log.warning("no answer: %s", error.message)
            return True

    async def _claim(self) -> int:
        """Claims as many rollouts as there are free slots; waits while there are none. Returns their number."""
        slots = self._settings.slots
        while (room := slots.run + slots.ahead - len(self._running)) <= 0:
            self._changed.clear()
            await self._changed.wait()
        try:
            claimed = await self._client.claim_rollouts(
                self._settings.name,
                room,
                ttl=self._settings.ttl,
                wait=self._settings.wait,
                submission=self._settings.submission,
            )
        except RolltapError as error:
            log.warning("could not claim rollouts: %s", error.message)
            await asyncio.sleep(self._settings.wait)
            return 0
        for claimed_task in claimed:
            task = asyncio.create_task(self._take(claimed_task))
            self._running[claimed_task.claim] = task
            task.add_done_callback(lambda _, claim=claimed_task.claim: self._ended(claim))
        return len(claimed)

    def _ended(self, claim: ClaimedRollout) -> None:
        del self._running[claim]
        self._changed.set()

    async def _take(self, claimed: ClaimedTask) -> None:
        try:
            assignment = build(claimed.task, self._defaults, self._client)
        except RolltapError as error:
            await self._refuse(claimed, error)
            return
        try:
            await self._runner.run(claimed.claim, assignment)
        except RolltapError as error:  # the report failed; the claim expires, and other nodes try the rollout
            log.warning("rollout %s: %s", claimed.claim.rollout_id, error.message)

    async def _refuse(self, claimed: ClaimedTask, error: RolltapError) -> None:
        """Ends a rollout as failed, with the reason, if its task can't run on this node."""
        with suppress(RolltapError):
            session = await self._client.start_rollout(claimed.claim, ttl=60, runner=self._name)
            end = FinishRollout(
                RolloutStatus.FAILED,
                session.attempt,
                f"{error.code}: {error.message}",
                node_token=claimed.claim.token,
                cause=Cause.INFRASTRUCTURE,
            )
            await self._client.finish_rollout(claimed.claim.rollout_id, end)

    @property
    def _name(self) -> str:
        return self._settings.name

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._settings.ttl / 3)
            claims = set(self._running)
            try:
                tokens = sorted({claim.token for claim in claims})
                claimed_ids = await self._client.heartbeat(self._name, tokens, ttl=self._settings.ttl)
            except RolltapError as error:
                log.warning("no heartbeat: %s", error.message)
                continue
            for claim in claims & set(self._running):
                if claim.rollout_id not in claimed_ids:
                    self._drop(claim)

    def _drop(self, claim: ClaimedRollout) -> None:
        self._runner.abandon(claim)
        self._running[claim].cancel()

    async def _leave(self, beating: asyncio.Task[None]) -> None:
        """Kills the running rollouts and releases their claims."""
        beating.cancel()
        running = list(self._running.values())
        for claim in list(self._running):
            self._drop(claim)
        await asyncio.gather(*running, return_exceptions=True)
        await self._runner.settle()
        with suppress(RolltapError):
            await self._client.release(self._name)
