"""Code of others that blocks its event loop blocks no other one."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from contextvars import ContextVar

import pytest

from rolltap.harnesses.threads import in_own_loop, on_loop

NAME = ContextVar("name", default="nobody")


async def blocks(gate: threading.Event) -> bool:
    return gate.wait(30)


async def test_who_blocks_its_own_loop_delays_nobody() -> None:
    gate = threading.Event()
    work = asyncio.create_task(in_own_loop(lambda: blocks(gate)))
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not work.done()
    gate.set()
    assert await work


async def test_results_errors_and_the_callers_context_pass() -> None:
    async def name() -> str:
        return NAME.get()

    async def fail() -> None:
        raise LookupError("no such trial")

    async def give_up() -> None:
        raise asyncio.CancelledError

    NAME.set("a tenant")
    names = await asyncio.gather(*(in_own_loop(name) for _ in range(40)))
    assert names == ["a tenant"] * 40
    with pytest.raises(LookupError, match="no such trial"):
        await in_own_loop(fail)
    with pytest.raises(asyncio.CancelledError):
        await in_own_loop(give_up)


async def test_a_program_is_started_and_what_the_work_left_ends_with_its_loop() -> None:
    left: list[asyncio.Task[None]] = []

    async def echo() -> bytes:
        left.append(asyncio.create_task(asyncio.sleep(3600)))
        process = await asyncio.create_subprocess_exec("echo", "done", stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0]

    assert await in_own_loop(echo) == b"done\n"
    while not left[0].done():  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert left[0].cancelled()


async def test_the_work_reaches_its_callers_loop() -> None:
    ours, threads = asyncio.get_running_loop(), list[str]()

    async def here() -> str:
        threads.append(threading.current_thread().name)
        return "opened"

    async def work() -> str:
        threads.append(threading.current_thread().name)
        return await on_loop(ours, here)

    assert await in_own_loop(work) == "opened"
    assert threads == ["rolltap-loop", threading.current_thread().name]


@pytest.mark.parametrize("place", ["its own loop", "its caller's loop"])
@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_reaches_the_work_and_its_end_is_awaited(place: str, times: int) -> None:
    """A trial's clean-up, and the number of an attempt that is being opened, are waited for."""
    ours, began, ended = asyncio.get_running_loop(), threading.Event(), list[str]()

    async def work() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            time.sleep(0.05)  # noqa: ASYNC251
            ended.append("clean")

    async def work_here() -> None:
        try:
            await on_loop(ours, work)
        finally:
            ended.append("outer")

    task = asyncio.create_task(in_own_loop(work if place == "its own loop" else work_here))
    while not began.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == (["clean"] if place == "its own loop" else ["clean", "outer"])


async def test_who_goes_on_in_spite_of_a_cancellation_gives_its_result() -> None:
    began = threading.Event()

    async def stubborn() -> str:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return "kept"

    task = asyncio.create_task(in_own_loop(stubborn))
    while not began.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    task.cancel()
    assert await task == "kept"
