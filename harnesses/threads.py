"""Threads for work on an agent's files, and for code of others that reads them in its event loop.

Such work may take very long: an agent can leave millions of files. asyncio's own threads are few, and the runner's
client needs them for answers of the server, so for heartbeats: without one in time, a node loses all its rollouts. Only
what has an end in any case, such as ending processes, may run there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = ThreadPoolExecutor(32, thread_name_prefix="rolltap-files")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, in these threads."""
    call = partial(copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


async def in_own_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`await work()` in an event loop of its own, in a thread of its own: it may block that loop, and no other.

    A cancellation reaches the work, whose end is awaited. What belongs to the caller's loop, the work reaches by
    `on_loop`.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=_serve, args=(loop,), name="rolltap-loop", daemon=True).start()
    try:
        return await on_loop(loop, work)
    finally:
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Runs `loop` until it is stopped, then ends what is left in it."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


async def on_loop(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`await work()` on the running `loop` of another thread. A cancellation reaches it, and its end is awaited."""
    ended = Future[T]()
    tasks = list[asyncio.Task[T]]()

    def start() -> None:
        tasks.append(task := loop.create_task(work()))
        task.add_done_callback(settle)

    def settle(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            ended.cancel()
        elif (error := task.exception()) is not None:
            ended.set_exception(error)
        else:
            ended.set_result(task.result())

    loop.call_soon_threadsafe(start)
    waiting = asyncio.wrap_future(ended)
    while True:
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if waiting.done():
                raise
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())


def contained(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)`, code of others. What it raises that is no `Exception`, as `sys.exit` and `pytest.fail` do, is
    a `RuntimeError`: as itself it would end the runner, and every rollout with it. Ctrl-C reaches the main thread
    alone: elsewhere a `KeyboardInterrupt` is the function's own."""
    try:
        return function(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        raise RuntimeError(named(error)) from error


def named(error: BaseException) -> str:
    """An exception in one line: its type and what it says."""
    return f"{type(error).__name__}: {error}"
