"""Group commit: entries appended during a transaction are all written in the next one.

An entry's future ends when its transaction is durable, or raises the entry's error. Entries are committed in the order
in which they were appended. An entry is written even if its caller is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rolltap.errors import RolltapError, StoreUnavailable

E = TypeVar("E")

MAX_ENTRIES = 2048
LINGER_S = 0.05
"""Maximum seconds that an entry without hurry waits for other entries."""


@dataclass(slots=True, eq=False)
class PendingWrite(Generic[E]):
    """A value to write. The commit sets `failure` if only this entry fails."""

    value: E
    written: asyncio.Future[None]
    failure: RolltapError | None = None


class GroupCommit(Generic[E]):
    """Passes entries to `commit`, one group at a time. `commit` raises if no entry of the group was written."""

    def __init__(self, commit: Callable[[Sequence[PendingWrite[E]]], Awaitable[None]]) -> None:
        self._commit = commit
        self._waiting: deque[PendingWrite[E]] = deque()
        self._wake = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Writes the waiting entries. Later entries are refused."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
            self._task = None

    def append(self, value: E, *, hurry: bool = True) -> asyncio.Future[None]:
        """Queues `value`; the future ends when it is written. Without `hurry` it waits briefly for other entries."""
        entry = PendingWrite(value, asyncio.get_running_loop().create_future())
        if self._closing or self._task is None:
            entry.written.set_exception(StoreUnavailable("the store is closed"))
            return entry.written
        self._waiting.append(entry)
        if hurry:
            self._wake.set()
        elif self._linger is None and not self._wake.is_set():
            self._linger = entry.written.get_loop().call_later(LINGER_S, self._wake.set)
        return entry.written

    async def _run(self) -> None:
        while self._waiting or not self._closing:
            await self._wake.wait()
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_ENTRIES))]
            if not self._waiting and not self._closing:
                self._wake.clear()
            if group:
                await self._write(group)

    async def _write(self, group: Sequence[PendingWrite[E]]) -> None:
        failure: BaseException | None = None
        try:
            await self._commit(group)
        except Exception as error:  # noqa: BLE001 - it is raised again, in every caller of this group
            failure = error
        except asyncio.CancelledError:
            failure = StoreUnavailable("the store was closed during a commit")
            raise
        finally:
            for entry in group:
                if entry.written.done():  # its caller was cancelled
                    continue
                error = failure or entry.failure
                if error is None:
                    entry.written.set_result(None)
                else:
                    entry.written.set_exception(error)
