"""Blocking work in threads, beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, run in a thread. Unlike `asyncio.to_thread`, a caller that is cancelled leaves only when
    the work has ended, so that it may close what the work uses: SQLite ends the process if a connection is closed while
    another thread reads from it.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        raise
    finally:
        if running.done() and not running.cancelled():
            running.exception()  # read, or asyncio complains of one that nobody has seen
