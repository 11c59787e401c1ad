"""Several replicas of one engine behind one name.

A session stays on its replica, which has the cache of its prefix. A new session goes to the replica with the fewest
requests. A replica that fails `FAILURES` times in a row is ejected, and its sessions move. Replicas that fail a push of
weights are ejected; if all fail, the old weights keep serving.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from functools import partial

from cachetools import LRUCache

from rolltap.contract.trainer import TokenScores
from rolltap.errors import EngineProtocolError, EngineRefused, EngineTimeout, EngineUnavailable
from rolltap.proxy.engines.base import (
    Engine,
    EngineFacts,
    PauseMode,
    SampleRequest,
    Scorer,
    ScoreRequest,
    StatesWeights,
    Take,
)
from rolltap.proxy.engines.pool_receiver import PoolReceiver
from rolltap.proxy.engines.receivers import Receiver
from rolltap.proxy.engines.replicas import Replica, Replicas
from rolltap.proxy.engines.retries import DEFAULT_RETRIES, Retries, retried

FAILURES = 3
PROBE_EVERY_S = 2.0
SESSIONS = 100_000
"""Number of sessions whose replica is remembered."""


class EnginePool:
    """An `Engine` over `engines`. Each of them tries a request once; a retry may go to another replica."""

    def __init__(
        self,
        name: str,
        engines: Sequence[Engine],
        *,
        retries: Retries = DEFAULT_RETRIES,
        probe_every_s: float = PROBE_EVERY_S,
    ) -> None:
        self.name = name
        self.replicas = Replicas(name, engines, probe_every_s=probe_every_s)
        self._receiver = PoolReceiver(self.replicas)
        self._retries = retries
        self._by_session: LRUCache[str, Replica] = LRUCache(SESSIONS)

    async def probe(self) -> EngineFacts:
        """The features that all replicas have. Ejects replicas that do not answer."""
        answers: list[EngineFacts] = []
        for replica, result in await self.replicas.ask_all(lambda replica: replica.engine.probe()):
            if isinstance(result, EngineFacts):
                answers.append(result)
            else:
                self.replicas.eject(replica, result)
        if not answers:
            raise EngineUnavailable(f"engine {self.name}: none of its {len(self.replicas)} replicas answers")
        return _common(answers, len(self.replicas))

    async def sample(self, request: SampleRequest, take: Take) -> None:
        tried: list[Replica] = []
        await retried(self.name, request.id, partial(self._attempt, request, tried), take, self._retries)

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Scores on one replica, without a retry."""
        replica = self._choose("", ())
        if not isinstance(replica.engine, Scorer):
            raise EngineRefused(f"engine {self.name} can't score given ids", http_status=501)
        replica.running += 1
        try:
            return await replica.engine.score(request)
        finally:
            replica.running -= 1

    async def served_weights(self) -> int | None:
        """The version of all serving replicas; None if they differ, as any of them may get the call."""
        engines = [replica.engine for replica in self.replicas.serving]
        stated = await asyncio.gather(*(each.served_weights() for each in engines if isinstance(each, StatesWeights)))
        return stated[0] if stated and len(stated) == len(engines) and len(set(stated)) == 1 else None

    async def pause(self, mode: PauseMode) -> None:
        async with self.replicas.changing:
            self.replicas.paused = True
            await self.replicas.change_all(lambda replica: replica.pause(mode))

    async def resume(self) -> None:
        async with self.replicas.changing:
            self.replicas.paused = False
            await self.replicas.change_all(lambda replica: replica.resume())

    async def load_weights(self, path: str, version: int, adapter: str = "") -> None:
        replicas = self.replicas
        async with replicas.changing:
            await replicas.change_all(lambda replica: replica.engine.load_weights(path, version, adapter))
            replicas.folder, replicas.sent_version, replicas.expected = (path, version, adapter), None, version

    @property
    def receiver(self) -> Receiver | None:
        return self._receiver if all(replica.engine.receiver for replica in self.replicas) else None

    async def close(self) -> None:
        await self.replicas.close()

    async def _attempt(self, request: SampleRequest, tried: list[Replica], take: Take) -> None:
        replica = self._choose(request.session_id, tried)
        tried.append(replica)
        replica.running += 1
        try:
            await replica.engine.sample(request, take)
            replica.failures = 0
        except (EngineUnavailable, EngineTimeout, EngineProtocolError) as error:
            replica.failures += 1
            if replica.failures >= FAILURES:
                self.replicas.eject(replica, error)
            raise
        finally:
            replica.running -= 1

    def _choose(self, session: str, tried: Sequence[Replica]) -> Replica:
        """The session's replica, or else the least busy one that this request has not tried yet."""
        serving = self.replicas.serving
        if not serving:
            raise EngineUnavailable(f"engine {self.name}: all of its {len(self.replicas)} replicas are down")
        former = self._by_session.get(session)
        if former is not None and not former.ejected and former not in tried:
            return former
        fresh = [replica for replica in serving if replica not in tried] or serving
        replica_of_call = min(
            fresh, key=lambda replica: (replica.running, _rank(session, self.replicas.all.index(replica)))
        )
        if session:
            self._by_session[session] = replica_of_call
        return replica_of_call


def _rank(session: str, index: int) -> int:
    """Breaks ties the same way in every proxy, and differently for every session."""
    return zlib.crc32(f"{session}/{index}".encode())


def _common(answers: Sequence[EngineFacts], replicas: int) -> EngineFacts:
    first = answers[0]
    models = [model for model in first.models if all(model in facts.models for facts in answers)]
    modes = {facts.logprobs_mode for facts in answers}
    notes = list(dict.fromkeys(note for facts in answers for note in facts.notes))
    if len(answers) < replicas:
        notes.append(f"{replicas - len(answers)} of {replicas} replicas are down")
    if len(modes) > 1:
        notes.append(f"replicas differ in their log-probs mode: {', '.join(sorted(modes))}")
    return EngineFacts(
        kind=first.kind,
        url=",".join(facts.url for facts in answers),
        models=tuple(models),
        max_context=min((facts.max_context for facts in answers if facts.max_context), default=None),
        weight_versions=all(facts.weight_versions for facts in answers),
        weight_updates=all(facts.weight_updates for facts in answers),
        logprobs_mode=first.logprobs_mode if len(modes) == 1 else "unknown",
        notes=tuple(notes),
        structured_output=all(facts.structured_output for facts in answers),
        states_weights=all(facts.states_weights for facts in answers),
    )
