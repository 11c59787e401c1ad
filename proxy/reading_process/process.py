"""Sends questions to the reading process. Starts it with the first question, and again if it died.

The process that serves agents only writes the record. Reading, rebuilding, packing and rendering take processor time,
which its event loop and Python's lock would take from agents' calls.

A reading process that sends nothing for `limits.read_s` seconds is killed. The caller gets an error; other questions
that the process had are sent again to the new one. It only reads, so nothing is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from rolltap import errors
from rolltap.decoding import from_json
from rolltap.errors import RolltapError, StoreUnavailable
from rolltap.proxy.reading_process.child import ERROR_STATUS, WireError
from rolltap.proxy.reading_process.questions import TENANT_HEADER, TIMELINE_HEADER, Answer, P, Question, name_of
from rolltap.settings import KeySettings, Settings
from rolltap.tenants import current_tenant

log = logging.getLogger("rolltap.reading")

PART_BYTES = 256 << 10
"""An answer is passed on in parts, so that a large one is never whole in the process that serves agents."""

ENDS_WITHIN_S = 5.0
END_NOTICED_WITHIN_S = 1.0
"""The socket of a killed process closes before this process notices its end."""


class ReadingProcess:
    """An `AskRecord`. `settled` returns when all that was written can be read from the store, whose newest timeline
    `timeline` gives."""

    def __init__(self, settings: Settings, settled: Callable[[], Awaitable[None]], timeline: Callable[[], int]) -> None:
        self._settings = settings.model_copy(update={"keys": KeySettings()})
        self._settled = settled
        self._timeline = timeline
        self._starting = asyncio.Lock()
        self._child: Subprocess | None = None
        self._folder: SocketFolder | None = None
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, question: Question[P], *args: P.args, **kwargs: P.kwargs) -> Answer:
        assert not kwargs, "arguments go by position"
        await self._settled()
        body = msgspec.json.encode(args)
        try:
            reply = await self._reply(name_of(question), body)
        except aiohttp.ClientError as error:
            raise (self._kill_stuck() if isinstance(error, TimeoutError) else _process_ended(error)) from error
        if reply.status != 200:
            raise _decode_error(reply.status, b"".join([part async for part in self._parts(reply)]))
        return Answer(reply.headers["content-type"], int(reply.headers["content-length"]), self._parts(reply))

    async def _reply(self, name: str, body: bytes) -> aiohttp.ClientResponse:
        """Asks up to three times: the process may have died, long ago or just now, or has refused and is ending."""
        for end_within_s in (END_NOTICED_WITHIN_S, ENDS_WITHIN_S):
            http = await self._started()
            child = self._child
            assert child is not None
            try:
                return await self._post(http, name, body)
            except aiohttp.ClientError as error:
                if isinstance(error, TimeoutError):
                    raise
            with suppress(TimeoutError):  # the first time it may be alive and have closed an idle connection
                async with asyncio.timeout(end_within_s):
                    await child.wait()
        if child.returncode is None:
            child.kill()
            await child.wait()
        return await self._post(await self._started(), name, body)

    async def _post(self, http: aiohttp.ClientSession, name: str, body: bytes) -> aiohttp.ClientResponse:
        headers = {TENANT_HEADER: current_tenant(), TIMELINE_HEADER: str(self._timeline())}
        return await http.post(f"http://reading/{name}", data=body, headers=headers)

    async def _parts(self, reply: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async with reply:
                async for part in reply.content.iter_chunked(PART_BYTES):
                    yield part
        except aiohttp.ClientError as error:
            raise (self._kill_stuck() if isinstance(error, TimeoutError) else _process_ended(error)) from error

    def _kill_stuck(self) -> StoreUnavailable:
        """Kills the process. The next question starts a new one."""
        if self._child is not None and self._child.returncode is None:
            log.warning(
                "the process that reads the record said nothing for %g s and is ended", self._settings.limits.read_s
            )
            self._child.kill()
        return StoreUnavailable(
            f"the record was not read within {self._settings.limits.read_s:g} s; ask for less at once, or raise "
            "limits.read_s",
            retry_after=1.0,
        )

    async def _started(self) -> aiohttp.ClientSession:
        async with self._starting:
            if self._child is not None and self._child.returncode is not None:
                log.warning("the process that reads the record ended with %d; starts anew", self._child.returncode)
                await self.close()
            if self._http is None:
                self._http = await self._start()
            return self._http

    async def _start(self) -> aiohttp.ClientSession:
        self._folder = await asyncio.to_thread(SocketFolder.make)
        path = str(self._folder.path / "socket")
        with socket.socket(socket.AF_UNIX) as listener:  # the child's alone from here on: it closes with the child
            listener.bind(path)
            listener.listen(128)
            command = (sys.executable, "-m", "rolltap.proxy.reading_process.child", str(listener.fileno()))
            self._child = Subprocess(command, self._settings.model_dump_json().encode(), [listener.fileno()])
        timeout = aiohttp.ClientTimeout(total=None, sock_read=self._settings.limits.read_s)
        return aiohttp.ClientSession(connector=aiohttp.UnixConnector(path, limit=0), timeout=timeout)

    async def close(self) -> None:
        """Ends the process, if there is one."""
        if self._http is not None:
            await self._http.close()
            self._http = None
        if self._child is not None:
            self._child.close_input()
            try:
                async with asyncio.timeout(ENDS_WITHIN_S):
                    await self._child.wait()
            except TimeoutError:
                self._child.kill()
                await self._child.wait()
            self._child = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def _process_ended(error: aiohttp.ClientError) -> StoreUnavailable:
    return StoreUnavailable(f"the process that reads the record ended: {error}", retry_after=1.0)


def _decode_error(status: int, body: bytes) -> RolltapError:
    if status != ERROR_STATUS:
        return RolltapError("the process that reads the record failed; the server's log has it")
    wire_error = from_json(body, WireError)
    kind: type[RolltapError] = getattr(errors, wire_error.name)
    return kind(wire_error.message, param=wire_error.param, retry_after=wire_error.retry_after)


PREFIX = "rolltap-reading-"


@dataclass(frozen=True, slots=True)
class SocketFolder:
    """The folder of the process's socket. It is this user's, and nobody else can enter it.

    `lock` is its file descriptor, open and locked. The system releases the lock however the owner ends, so the next
    process that makes such a folder can tell folders that `kill -9` left behind from those in use, even if the
    processes do not see one another.
    """

    path: Path
    lock: int

    @classmethod
    def make(cls) -> Self:
        """Makes a new folder, after it has removed those without an owner."""
        for old_folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            if (lock := _try_lock(old_folder)) is not None:
                cls(old_folder, lock).remove()
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            if (lock := _try_lock(path)) is not None:  # else another process has just taken it for abandoned
                return cls(path, lock)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _try_lock(path: Path) -> int | None:
    """Locks the folder and returns its file descriptor.

    Returns None if it belongs to another process or user, or is no folder any more.
    """
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.getuid() and os.fstat(lock).st_ino == os.stat(path).st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


class Subprocess:
    """Starts `command`, which inherits the descriptors `pass_fds` and is given `line` on standard input.

    To be made on the event loop, which it blocks until the program runs, about 1 ms. uvloop starts a process by a fork,
    and the event loop waits for it. A fork copies the page tables of a large server, and runs the fork handlers of
    every loaded library in the child: one that waits for a lock there stops the loop for good. `subprocess` uses vfork
    on Linux, which does neither.
    """

    def __init__(self, command: Sequence[str], line: bytes, pass_fds: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, pass_fds=pass_fds)
        # A thread of its own, as it lives as long as the process. It writes too: a process that hangs reads nothing.
        threading.Thread(target=self._serve, args=(line, loop), name=f"process {self.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal's number if a signal ended it."""
        return self._process.returncode

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        """Returns `returncode` once the process has ended."""
        await self._ended.wait()
        return self._process.wait()

    def _serve(self, line: bytes, loop: asyncio.AbstractEventLoop) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # it has ended, or its input was closed
            self._process.stdin.write(line + b"\n")
        self._process.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._ended.set)
