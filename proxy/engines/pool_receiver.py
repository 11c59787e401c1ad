"""A trainer's broadcast of weights to a pool: it goes to every replica that answers.

A replica that is away, or has lost the weights since, is back with the next push.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from rolltap.contract.trainer import Transfer
from rolltap.errors import EngineError, EngineUnavailable, WeightsLost
from rolltap.proxy.engines.receivers import Receiver
from rolltap.proxy.engines.replicas import Replica, Replicas


class PoolReceiver:
    """The receivers of a pool's replicas as one: their ranks follow one another in the trainer's group."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._group = ""
        self._members: list[tuple[Replica, Receiver, int]] = []  # of the group, each with its first rank

    async def ranks(self) -> int:
        """The ranks of all replicas that answer. Ejected ones count: they are back after a whole transfer."""
        return sum(ranks for _, _, ranks in await self._answering())

    async def join(self, transfer: Transfer, first_rank: int = 1) -> None:
        replicas = self._replicas
        async with replicas.changing:
            members: list[tuple[Replica, Receiver, int]] = []
            for replica, receiver, ranks in await self._answering():
                members.append((replica, receiver, first_rank))
                first_rank += ranks
            if first_rank != transfer.world_size:
                rank_count, expected = first_rank - 1, transfer.world_size - 1
                raise EngineError(f"engine {replicas.name} has {rank_count} ranks now, not {expected}")
            if replicas.paused:
                await _all_or_none(replica.pause("keep") for replica, _, _ in members if replica.ejected)
            await _all_or_none(receiver.join(transfer, rank) for _, receiver, rank in members)
            self._group, self._members = transfer.group, members

    async def receive(self, transfer: Transfer) -> None:
        """All replicas or none: after a transfer that one replica breaks off, what the others hold is unknown."""
        replicas = self._replicas
        async with replicas.changing:
            if self._group != transfer.group:
                raise EngineError(f"engine {replicas.name} is not in group {transfer.group!r}: another push has begun")
            members, self._group, self._members = self._members, "", []
            for replica, _, _ in members:
                replica.sent_version = None
            try:
                await _all_or_none(receiver.receive(transfer) for _, receiver, _ in members)
            except EngineError as error:
                if len(members) == 1:
                    raise
                raise WeightsLost(f"engine {replicas.name}: its replicas wait for a whole push: {error}") from error
            replicas.folder, replicas.sent_version, replicas.expected = None, transfer.version, transfer.version
            for replica, _, _ in members:
                replica.failures, replica.ejected, replica.sent_version = 0, False, transfer.version
            received = [replica for replica, _, _ in members]
            for replica in replicas:
                if replica not in received:
                    away = EngineUnavailable(f"it was away when version {transfer.version} was sent")
                    replicas.eject(replica, away)

    async def holds(self, version: int) -> bool:
        return self._replicas.sent_version == version

    async def _answering(self) -> list[tuple[Replica, Receiver, int]]:
        """The replicas that answer, and how many ranks each has; raises if none does."""

        async def count(replica: Replica) -> int:
            assert replica.engine.receiver is not None
            return await replica.engine.receiver.ranks()

        results = await self._replicas.ask_all(count)
        answering = [
            (replica, replica.engine.receiver, result)
            for replica, result in results
            if isinstance(result, int) and replica.engine.receiver is not None
        ]
        if not answering:
            raise results[0][1]
        return answering


async def _all_or_none(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Makes all the calls at once. The first that fails cancels the others: they wait for one another."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
