"""Asks the reader server to read what an agent wrote.

A file of a few kilobytes can take gigabytes or minutes to decode. So nothing that an agent wrote is parsed in the
runner, whose event loop also sends heartbeats and relays the calls of all other runs. Each question is a function and
its arguments. It runs in a process of its own, which the server (`server.py`) forks: it has a limit of memory, of
processor time and of time, none of the runner's environment, and ends with its answer. A failure of that process is
`Unreadable`: it says something about the files, never about the machine.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar, get_type_hints

import msgspec

from rolltap import errors
from rolltap.decoding import from_json
from rolltap.errors import Unreadable
from rolltap.harnesses.untrusted.server import ANSWER_BYTES, END, REPORT, RUN, AnswerKind, Question

P = ParamSpec("P")
T = TypeVar("T")

STARTS = 2
"""The server may have died since the last question, for example by the machine's lack of memory."""


class ReaderServer:
    """The server process of this process. It starts with the first question and ends with this process."""

    def __init__(self) -> None:
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
                    [sys.executable, "-P", "-c", RUN],
                    stdin=theirs,
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


_SERVER = ReaderServer()
atexit.register(lambda: _SERVER.close())


async def read_untrusted(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Returns `function(*args)`, run by a reader process. The function belongs to a module, and all its types are
    annotated: plain values, dataclasses, and for arguments paths.

    Raises the function's own `RolltapError`s, and `Unreadable` if it runs out of memory or time, or raises anything
    else.
    """
    assert not kwargs, "arguments go by position"
    question = Question(function.__module__, function.__qualname__, msgspec.json.encode(args, enc_hook=str).decode())
    whole, end, _ = (reply := await _ask(msgspec.json.encode(question))).partition(END)
    if not end:  # the server says how it ended
        raise Unreadable(reply.rpartition(REPORT)[2].decode("utf-8", "replace") or "the process that read it has ended")
    kind, _, body = whole.partition(b" ")
    if kind == AnswerKind.RESULT.encode():
        return from_json(body, get_type_hints(function)["return"])
    name, message = from_json(body, tuple[str, str])
    error = getattr(errors, name, Unreadable)
    raise error(message)


async def _ask(question: bytes) -> bytes:
    connection = _SERVER.connect()
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
