"""Asks a server of reader processes to read what an agent wrote.

A file of a few kilobytes can take gigabytes or minutes to decode. So what an agent wrote is not parsed in a process
that others depend on: in the runner, whose event loop also sends heartbeats and relays the calls of all other runs, or
in the process that serves leases. Each question is a function and its arguments. It runs in a process of its own, which
the server (`server.py`) forks: it has limits of memory, processor time and time, none of this process's environment,
and ends with its answer. A failure of that process is `Unreadable`: it says something about the text, never about the
machine.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar, get_type_hints

import msgspec

from rolltap import errors
from rolltap.decoding import from_json
from rolltap.errors import Unreadable
from rolltap.untrusted.server import ANSWER_BYTES, END, REPORT, RUN, AnswerKind, Question, ReadLimits

P = ParamSpec("P")
T = TypeVar("T")

STARTS = 2
"""The server may have died since the last question, for example by the machine's lack of memory."""


class ReaderServer:
    """A server process of this process. It starts with the first question and ends with this process.

    `modules` are imported once, before the first question: an import takes longer than most readings.
    """

    def __init__(self, modules: Sequence[str] = ()) -> None:
        self._modules = tuple(modules)
        atexit.register(self.close)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0

    def connect(self) -> socket.socket:
        """A connection to a new reader process. Starts the server if it is not running."""
        ours, theirs = socket.socketpair()
        with theirs:
            for attempt in range(STARTS):
                try:
                    with self._lock:
                        socket.send_fds(self._started(), [b"?"], [theirs.fileno()])
                    return ours
                except OSError as error:  # the server has ended
                    self.close()
                    if attempt == STARTS - 1:
                        ours.close()
                        raise Unreadable(f"no process could be started to read it: {error}") from error
        return ours

    def _started(self) -> socket.socket:
        is_here = self._owner == os.getpid()  # a forked runner has its own server
        if self._control is None or self._process is None or not is_here or self._process.poll() is not None:
            if self._control is not None:
                self._control.close()
            self._control, theirs = socket.socketpair()
            path = os.pathsep.join(map(os.path.abspath, sys.path))
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", RUN, *self._modules],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={"PYTHONPATH": path, "PATH": os.defpath, "LANG": "C.UTF-8"},
                    cwd="/",
                    start_new_session=True,
                )
            self._owner = os.getpid()
        return self._control

    def close(self) -> None:
        """Ends the server and its readers. The next question starts another."""
        with self._lock:
            if self._control is not None:
                self._control.close()
            if self._process is not None and self._owner == os.getpid():
                self._process.wait()
            self._control = self._process = None

    async def ask(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns `function(*args)`, run by a reader process. The function belongs to a module, and all its types are
        annotated: plain values, dataclasses, and for arguments paths.

        Raises the function's own `RolltapError`s, and `Unreadable` if it runs out of memory or time, or raises anything
        else.
        """
        assert not kwargs, "arguments go by position"
        return await self.ask_within(ReadLimits(), function, *args)

    async def ask_within(self, limits: ReadLimits, function: Callable[..., T], *args: Any) -> T:
        """`ask` with other limits."""
        packed = msgspec.json.encode(args, enc_hook=str).decode()
        question = Question(function.__module__, function.__qualname__, packed, limits)
        whole, end, _ = (reply := await self._reply(msgspec.json.encode(question))).partition(END)
        if not end:  # the server says how it ended
            raise Unreadable(reply.rpartition(REPORT)[2].decode("utf-8", "replace") or "its reader has ended")
        kind, _, body = whole.partition(b" ")
        if kind == AnswerKind.RESULT.encode():
            return from_json(body, get_type_hints(function)["return"])
        name, message = from_json(body, tuple[str, str])
        raise getattr(errors, name)(message)

    async def _reply(self, question: bytes) -> bytes:
        connection = self.connect()
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
        try:
            with suppress(ConnectionError):  # a reader that has ended already; its answer says why
                writer.write(question)
                await writer.drain()
                writer.write_eof()
            parts, size = [], 0
            with suppress(ConnectionError):
                while part := await reader.read(1 << 18):
                    parts.append(part)
                    if (size := size + len(part)) > ANSWER_BYTES:
                        raise Unreadable(f"more than {ANSWER_BYTES >> 20} MB would be kept of it")
            return b"".join(parts)
        finally:
            writer.close()
