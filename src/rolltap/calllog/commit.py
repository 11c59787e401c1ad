"""Group commit: what callers append while a transaction is under way goes into the next one, all of it together.

The future of an entry ends when the transaction that holds the entry is durable; it raises what became of this entry
otherwise. Entries are committed in the order in which they were appended. A caller that is cancelled takes nothing
back: its entry is written.
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
"""The longest that an entry without hurry waits for others to ride along with."""


@dataclass(slots=True, eq=False)
class PendingWrite(Generic[E]):
    """A value to write. The commit sets `failure` for this entry alone."""

    value: E
    written: asyncio.Future[None]
    failure: RolltapError | None = None


class GroupCommit(Generic[E]):
    """Feeds `commit` one group at a time. `commit` raises if nothing of the group was written."""

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
        """Writes what is waiting; later entries are refused."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task
            self._task = None

    def append(self, value: E, *, hurry: bool = True) -> asyncio.Future[None]:
        """The future ends when `value` is written. Without `hurry` it waits a little for others to go with it."""
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
            failure = StoreUnavailable("the store was closed in mid-commit")
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
