"""Threads for work on an agent's files.

Such work may take very long: an agent can leave millions of files. asyncio's own threads are few, and the runner's
client needs them for answers of the server, so for heartbeats: without one in time, a node loses all its rollouts. Only
what has an end in any case, such as ending processes, may run there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = ThreadPoolExecutor(32, thread_name_prefix="rolltap-files")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, in these threads."""
    call = partial(copy_context().run, function, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


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
