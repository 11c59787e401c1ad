"""Whatever an agent's file does to the process that reads it, the runner gets an error and goes on."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolltap.errors import EvaluatorFailed, Unreadable
from rolltap.harnesses.base import last_line
from rolltap.untrusted import ReaderServer, ReadLimits
from rolltap.untrusted.server import ANSWER_BYTES

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def reader_server() -> Iterator[ReaderServer]:
    """A server of this module's own, which can import the functions below."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        patch.setenv("ROLLTAP_TEST", "secret")
        reader_server = ReaderServer(("rolltap.harnesses.base",))
        yield reader_server
        reader_server.close()


def read_numbers(path: str, count: int) -> list[int]:
    return list(range(count))


def fill_memory(path: str) -> int:
    return len(bytearray((ReadLimits().memory_mb + 1) << 20))


def use_processor(path: str) -> None:
    while True:
        pass


def crash(path: str) -> None:
    ctypes.string_at(0)


def recurse(path: str) -> None:
    recurse(path)


def answer_at_length(path: str) -> str:
    return "x" * (ANSWER_BYTES + 1)


def refuse(path: str) -> None:
    raise EvaluatorFailed("no report")


def show_surroundings(path: str) -> dict[str, str]:
    return {**os.environ, "folder": os.getcwd(), "descriptors": " ".join(os.listdir("/proc/self/fd"))}


BAD = {
    fill_memory: f"more than {ReadLimits().memory_mb} MB of memory",
    crash: "SIGSEGV",
    recurse: "RecursionError",
    answer_at_length: "would be kept",
}


async def test_a_function_is_answered_by_another_process(reader_server: ReaderServer) -> None:
    assert await reader_server.ask(read_numbers, "", 3) == [0, 1, 2]
    with pytest.raises(EvaluatorFailed, match="no report"):
        await reader_server.ask(refuse, "")


@pytest.mark.parametrize("reader", BAD, ids=lambda reader: reader.__name__)
async def test_what_a_file_does_to_its_reader_is_an_error_for_the_runner(
    reader: object, reader_server: ReaderServer
) -> None:
    with pytest.raises(Unreadable, match=BAD[reader]):  # type: ignore[index]
        await reader_server.ask(reader, "")  # type: ignore[arg-type, var-annotated]
    assert await reader_server.ask(read_numbers, "", 1) == [0]


def wait_for_no_reader(reader_server: ReaderServer) -> None:
    assert reader_server._process is not None
    pid, until = reader_server._process.pid, time.monotonic() + 20
    while Path(f"/proc/{pid}/task/{pid}/children").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)


async def test_a_slow_reader_keeps_nobody_waiting(reader_server: ReaderServer) -> None:
    slow = asyncio.create_task(reader_server.ask(use_processor, ""))
    began, late = time.monotonic(), 0.0
    while time.monotonic() < began + 0.5:
        at = time.monotonic()
        await asyncio.sleep(0.01)
        late = max(late, time.monotonic() - at)
    assert late < 0.4
    surroundings = await reader_server.ask(show_surroundings, "")
    assert "ROLLTAP_TEST" not in surroundings
    assert len(surroundings["descriptors"].split()) <= 5  # standard ones, the connection, the listing itself
    slow.cancel()
    await asyncio.to_thread(wait_for_no_reader, reader_server)  # nobody waits for its answer any more


async def test_a_server_that_was_killed_starts_again(reader_server: ReaderServer) -> None:
    assert await reader_server.ask(read_numbers, "", 1) == [0]
    process = reader_server._process
    assert process is not None
    process.kill()
    process.wait()
    assert await reader_server.ask(read_numbers, "", 1) == [0]


async def test_a_reader_is_cheap(reader_server: ReaderServer) -> None:
    """Twenty readings are those of ten rollouts."""
    await reader_server.ask(last_line, "one\ntwo")
    began = time.process_time()
    for _ in range(20):
        await reader_server.ask(last_line, "one\ntwo")
    assert time.process_time() - began < 0.5


async def test_a_limit_of_time_ends_a_reader(reader_server: ReaderServer) -> None:
    with pytest.raises(Unreadable, match="too long"):
        await reader_server.ask_within(ReadLimits(seconds=0.2), use_processor, "")
