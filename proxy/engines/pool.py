"""Several replicas of one engine behind one name.

A session stays with its replica, where the cache of its prefix is; a new one goes to the replica with the fewest
requests. A replica that fails `FAILURES` times in a row is ejected: its sessions move, and it is asked every
`PROBE_EVERY_S` seconds until it answers again. Before it serves again it gets the weights that the others have, and
stands still if they do. A push that some replicas don't take ejects those; if none takes it, the old weights serve.
What a trainer sends over a group goes to every replica that answers; one that was away, or has lost it since, is back
with the next push.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import zlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rolltap.errors import (
    EngineError,
    EngineProtocolError,
    EngineTimeout,
    EngineUnavailable,
    RateLimited,
    WeightsLost,
)
from rolltap.proxy.engines.base import Engine, EngineFacts, PauseMode, SampleChunk, SampleRequest
from rolltap.proxy.engines.receivers import Receiver, Transfer
from rolltap.proxy.engines.retries import DEFAULT_RETRIES, Retries, retried

log = logging.getLogger("rolltap.engines")

FAILURES = 3
PROBE_EVERY_S = 2.0
SESSIONS = 100_000
"""How many sessions' places are remembered; the longest unused are forgotten first."""


@dataclass(eq=False, slots=True)
class Replica:
    engine: Engine
    running: int = 0
    failures: int = 0
    ejected: bool = False
    paused: bool = False  # by this pool
    sent: int | None = None  # the version that it has got from a trainer, all of it


class EnginePool:
    """An `Engine` over `engines`, each of which tries a request once: another try may go to another replica."""

    def __init__(
        self,
        name: str,
        engines: Sequence[Engine],
        *,
        retries: Retries = DEFAULT_RETRIES,
        probe_every_s: float = PROBE_EVERY_S,
    ) -> None:
        self.name = name
        self.replicas = [Replica(engine) for engine in engines]
        self._retries = retries
        self._probe_every_s = probe_every_s
        self._places: OrderedDict[str, Replica] = OrderedDict()
        self._weights: tuple[str, int, str] | None = None
        self._sent: int | None = None  # the version that is served, if a trainer sent it: there is no folder of it
        self._joined: tuple[str, list[tuple[Replica, Receiver, Transfer]]] = ("", [])  # the group, and who is in it
        self._paused = False
        self._changing = asyncio.Lock()  # a replica comes back before a change of all, or after it
        self._tasks: set[asyncio.Task[None]] = set()

    async def probe(self) -> EngineFacts:
        """What all replicas can do; those that don't answer are ejected."""
        found: list[EngineFacts] = []
        for replica, result in await self._each(lambda replica: replica.engine.probe(), self.replicas):
            if isinstance(result, EngineFacts):
                found.append(result)
            else:
                self._eject(replica, result)
        if not found:
            raise EngineUnavailable(f"engine {self.name}: none of its {len(self.replicas)} replicas answers")
        return _common(found, len(self.replicas))

    def sample(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        tried: list[Replica] = []
        return retried(self.name, request.id, lambda: self._attempt(request, tried), self._retries)

    async def pause(self, mode: PauseMode) -> None:
        async with self._changing:
            self._paused = True
            await self._all(lambda replica: _pause(replica, mode))

    async def resume(self) -> None:
        async with self._changing:
            self._paused = False
            await self._all(_resume)

    async def load_weights(self, path: str, version: int, adapter: str = "") -> None:
        async with self._changing:
            await self._all(lambda replica: replica.engine.load_weights(path, version, adapter))
            self._weights, self._sent = (path, version, adapter), None

    @property
    def receiver(self) -> Receiver | None:
        return self if all(replica.engine.receiver for replica in self.replicas) else None

    async def ranks(self) -> int:
        """Of all replicas that answer: the ejected ones, too, are back after a whole transfer."""
        return sum(ranks for _, _, ranks in await self._parties())

    async def join(self, transfer: Transfer) -> None:
        async with self._changing:
            joined: list[tuple[Replica, Receiver, Transfer]] = []
            first = transfer.first_rank
            for replica, receiver, ranks in await self._parties():
                joined.append((replica, receiver, dataclasses.replace(transfer, first_rank=first)))
                first += ranks
            if first != transfer.world_size:
                raise EngineError(f"engine {self.name} has {first - 1} ranks now, not {transfer.world_size - 1}")
            if self._paused:
                await _together(_pause(replica, "keep") for replica, _, _ in joined if replica.ejected)
            await _together(receiver.join(its) for _, receiver, its in joined)
            self._joined = transfer.group, joined

    async def receive(self, transfer: Transfer) -> None:
        """All or none: of a transfer that one replica breaks off, nobody knows what the others have."""
        async with self._changing:
            group, joined = self._joined
            if group != transfer.group:
                raise EngineError(f"engine {self.name} is not in group {transfer.group!r}: another push has begun")
            self._joined = ("", [])
            for replica, _, _ in joined:
                replica.sent = None
            try:
                await _together(receiver.receive(its) for _, receiver, its in joined)
            except EngineError as error:
                if len(joined) == 1:
                    raise
                raise WeightsLost(f"engine {self.name}: its replicas wait for a whole push: {error}") from error
            self._weights, self._sent = None, transfer.version
            for replica, _, _ in joined:
                replica.failures, replica.ejected, replica.sent = 0, False, transfer.version
            there = [replica for replica, _, _ in joined]
            for replica in self.replicas:
                if replica not in there:
                    self._eject(replica, EngineUnavailable(f"it was away when version {transfer.version} was sent"))

    async def holds(self, version: int) -> bool:
        return self._sent == version

    async def _parties(self) -> list[tuple[Replica, Receiver, int]]:
        """The replicas that answer, and how many ranks each has; raises if none does."""

        async def ranks(replica: Replica) -> int:
            assert replica.engine.receiver is not None
            return await replica.engine.receiver.ranks()

        found = await self._each(ranks, self.replicas)
        parties = [
            (replica, replica.engine.receiver, result)
            for replica, result in found
            if isinstance(result, int) and replica.engine.receiver is not None
        ]
        if not parties:
            raise found[0][1]
        return parties

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.engine.close() for replica in self.replicas))

    async def _attempt(self, request: SampleRequest, tried: list[Replica]) -> AsyncGenerator[SampleChunk, None]:
        replica = self._choose(request.session_id, tried)
        tried.append(replica)
        replica.running += 1
        chunks: Any = replica.engine.sample(request)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            replica.failures = 0
        except (EngineUnavailable, EngineTimeout, EngineProtocolError) as error:
            replica.failures += 1
            if replica.failures >= FAILURES:
                self._eject(replica, error)
            raise
        finally:
            replica.running -= 1

    def _choose(self, session: str, tried: Sequence[Replica]) -> Replica:
        """The session's replica, else the least busy one that this request has not been to yet."""
        serving = [replica for replica in self.replicas if not replica.ejected]
        if not serving:
            raise EngineUnavailable(f"engine {self.name}: all of its {len(self.replicas)} replicas are down")
        place = self._places.get(session)
        if place is not None and not place.ejected and place not in tried:
            self._places.move_to_end(session)
            return place
        fresh = [replica for replica in serving if replica not in tried] or serving
        chosen = min(fresh, key=lambda replica: (replica.running, _rank(session, self.replicas.index(replica))))
        if session:
            self._places[session] = chosen
            self._places.move_to_end(session)
            if len(self._places) > SESSIONS:
                self._places.popitem(last=False)
        return chosen

    async def _each(
        self, call: Callable[[Replica], Awaitable[Any]], replicas: Sequence[Replica]
    ) -> list[tuple[Replica, Any]]:
        """The result or the error of a call on each of the replicas, at once."""
        results = await asyncio.gather(*(call(replica) for replica in replicas), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (EngineError, RateLimited)):
                raise result
        return list(zip(replicas, results, strict=True))

    async def _all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """A call that every serving replica must follow: ejects those that don't, raises if none does.

        Where none serves it is for all: they may stand still since a push that a former process began.
        """
        serving = [replica for replica in self.replicas if not replica.ejected] or self.replicas
        results = await self._each(call, serving)
        failed = [(replica, result) for replica, result in results if isinstance(result, (EngineError, RateLimited))]
        if len(failed) == len(serving):
            raise failed[0][1]
        for replica, error in failed:
            self._eject(replica, error)

    def _eject(self, replica: Replica, error: EngineError | RateLimited) -> None:
        if replica.ejected:
            return
        replica.ejected = True
        log.warning("engine %s: replica %s is ejected: %s", self.name, replica.engine.name, error)
        task = asyncio.create_task(self._readmit(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _readmit(self, replica: Replica) -> None:
        while replica.ejected:
            await asyncio.sleep(self._probe_every_s)
            try:
                if not replica.paused:  # one that stands still samples nothing for a probe
                    await replica.engine.probe()
                async with self._changing:
                    await self._catch_up(replica)
            except (EngineError, RateLimited) as error:
                log.debug("engine %s: replica %s is still down: %s", self.name, replica.engine.name, error)

    async def _catch_up(self, replica: Replica) -> None:
        """Brings a replica that answers again to where the others are."""
        if self._sent is not None and not await _has(replica, self._sent):
            raise EngineUnavailable(f"it has not got version {self._sent}: the next push brings it back")
        if self._weights is not None:
            await replica.engine.load_weights(*self._weights)
        if self._paused:
            await _pause(replica, "keep")
        elif replica.paused:
            await _resume(replica)
        replica.failures, replica.ejected = 0, False
        log.warning("engine %s: replica %s serves again", self.name, replica.engine.name)


async def _pause(replica: Replica, mode: PauseMode) -> None:
    replica.paused = True
    await replica.engine.pause(mode)


async def _resume(replica: Replica) -> None:
    await replica.engine.resume()
    replica.paused = False


async def _has(replica: Replica, version: int) -> bool:
    """Whether a trainer sent the replica all of `version`, and it was not started anew since."""
    receiver = replica.engine.receiver
    return replica.sent == version and receiver is not None and await receiver.holds(version)


async def _together(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Makes all the calls at once. The first that fails cuts the others short: they wait for one another."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _rank(session: str, index: int) -> int:
    """Breaks ties the same way in every proxy, and differently for every session."""
    return zlib.crc32(f"{session}/{index}".encode())


def _common(found: Sequence[EngineFacts], replicas: int) -> EngineFacts:
    first = found[0]
    models = [model for model in first.models if all(model in facts.models for facts in found)]
    modes = {facts.logprobs_mode for facts in found}
    notes = list(dict.fromkeys(note for facts in found for note in facts.notes))
    if len(found) < replicas:
        notes.append(f"{replicas - len(found)} of {replicas} replicas are down")
    if len(modes) > 1:
        notes.append(f"replicas differ in their log-probs mode: {', '.join(sorted(modes))}")
    return EngineFacts(
        kind=first.kind,
        url=",".join(facts.url for facts in found),
        models=tuple(models),
        max_context=min((facts.max_context for facts in found if facts.max_context), default=None),
        weight_versions=all(facts.weight_versions for facts in found),
        weight_updates=all(facts.weight_updates for facts in found),
        logprobs_mode=first.logprobs_mode if len(modes) == 1 else "unknown",
        notes=tuple(notes),
        structured_output=all(facts.structured_output for facts in found),
    )
