"""Several streams as one, in the order in which their items come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
_END = object()


async def merge(streams: Sequence[AsyncIterator[T]]) -> AsyncIterator[T]:
    """The items of all `streams`. The first error of one ends all; closing this closes them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:  # type: ignore[type-var]
            async for item in only:
                yield item
        return
    queue: asyncio.Queue[object] = asyncio.Queue(maxsize=len(streams) * 4)

    async def pump(stream: AsyncIterator[T]) -> None:
        async with aclosing(stream) as items:  # type: ignore[type-var]
            async for item in items:
                await queue.put(item)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(pump(stream))

    runner = asyncio.create_task(run())
    runner.add_done_callback(lambda _: asyncio.ensure_future(queue.put(_END)))
    try:
        while (item := await queue.get()) is not _END:
            yield item  # type: ignore[misc]
        try:
            await runner
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    finally:
        runner.cancel()
        await asyncio.gather(runner, return_exceptions=True)
