"""The replicas of a pool: which of them serve, and how one that failed comes back.

A replica that fails is ejected and probed every `probe_every_s` seconds. Before it serves again it gets the weights
that the others have, and is paused if they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rolltap.errors import EngineError, EngineUnavailable, RateLimited
from rolltap.proxy.engines.base import Engine, PauseMode, StatesWeights

log = logging.getLogger("rolltap.engines")


@dataclass(eq=False, slots=True)
class Replica:
    """One server of a pool. `sent_version` is the version that it has received whole from a trainer, if any."""

    engine: Engine
    running: int = 0
    failures: int = 0
    ejected: bool = False
    paused: bool = False  # by this pool
    sent_version: int | None = None

    async def pause(self, mode: PauseMode) -> None:
        self.paused = True
        await self.engine.pause(mode)

    async def resume(self) -> None:
        await self.engine.resume()
        self.paused = False

    async def holds(self, version: int) -> bool:
        """Whether a trainer sent this replica all of `version`, and the server was not restarted since."""
        receiver = self.engine.receiver
        return self.sent_version == version and receiver is not None and await receiver.holds(version)


class Replicas:
    """The replicas of pool `name`, and the state that all that serve are in.

    `paused`, `folder` (path, version and adapter of weights that were loaded from a folder) and `sent_version` (of
    weights that a trainer sent: no folder has them) say what a replica must catch up with. Whoever changes them holds
    `changing`: a replica comes back before a change of all, or after it.
    """

    def __init__(self, name: str, engines: Sequence[Engine], *, probe_every_s: float) -> None:
        self.name = name
        self.all = [Replica(engine) for engine in engines]
        self.paused = False
        self.folder: tuple[str, int, str] | None = None
        self.sent_version: int | None = None
        self.expected: int | None = None  # the policy's version
        self.changing = asyncio.Lock()
        self._probe_every_s = probe_every_s
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.all if not replica.ejected]

    async def ask_all(self, call: Callable[[Replica], Awaitable[Any]]) -> list[tuple[Replica, Any]]:
        """The result or the error of a call on each replica, ejected ones too, all at once."""
        return await _ask(self.all, call)

    async def change_all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Makes a change that every serving replica must follow: ejects those that don't, raises if none does.

        Where none serves it is for all: they may be paused since a push that a former process began.
        """
        serving = self.serving or self.all
        failures = [
            (replica, result)
            for replica, result in await _ask(serving, call)
            if isinstance(result, (EngineError, RateLimited))
        ]
        if len(failures) == len(serving):
            raise failures[0][1]
        for replica, error in failures:
            self.eject(replica, error)

    async def expect(self, version: int, folder: str, adapter: str) -> None:
        """Notes the policy's version, which another process may have pushed, and the folder that has it, if any."""
        async with self.changing:
            self.expected = version
            if folder:
                self.folder, self.sent_version = (folder, version, adapter), None
            elif self.sent_version != version:
                self.folder = self.sent_version = None

    def eject(self, replica: Replica, error: EngineError | RateLimited) -> None:
        """Takes a replica out until it answers again."""
        if replica.ejected:
            return
        replica.ejected = True
        log.warning("engine %s: replica %s is ejected: %s", self.name, replica.engine.name, error)
        task = asyncio.create_task(self._readmit(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.engine.close() for replica in self.all))

    async def _readmit(self, replica: Replica) -> None:
        while replica.ejected:
            await asyncio.sleep(self._probe_every_s)
            try:
                if not replica.paused:  # a probe samples a token, and a paused server samples none
                    await replica.engine.probe()
                async with self.changing:
                    await self._catch_up(replica)
            except (EngineError, RateLimited) as error:
                log.debug("engine %s: replica %s is still down: %s", self.name, replica.engine.name, error)

    async def _catch_up(self, replica: Replica) -> None:
        """Brings a replica that answers again to the state of the others."""
        if self.sent_version is not None and not await replica.holds(self.sent_version):
            raise EngineUnavailable(f"it does not have version {self.sent_version}: the next push brings it back")
        if self.folder is not None:
            await replica.engine.load_weights(*self.folder)
        elif self.expected is not None and isinstance(replica.engine, StatesWeights):
            stated = await replica.engine.served_weights()
            if stated != self.expected:
                raise EngineUnavailable(f"it has version {stated}, not {self.expected}: the next push brings it back")
        if self.paused:
            await replica.pause("keep")
        elif replica.paused:
            await replica.resume()
        replica.failures, replica.ejected = 0, False
        log.warning("engine %s: replica %s serves again", self.name, replica.engine.name)


async def _ask(replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[Any]]) -> list[tuple[Replica, Any]]:
    results = await asyncio.gather(*(call(replica) for replica in replicas), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, (EngineError, RateLimited)):
            raise result
    return list(zip(replicas, results, strict=True))
