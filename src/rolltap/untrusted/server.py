"""The server of reader processes: imports the readers once, and forks a process for each question.

Standard input is a Unix socket on which connections arrive as descriptors, one for each question; the server ends with
it, and its readers with it. A reader's limits are the kernel's: memory (`RLIMIT_AS`), processor time (`RLIMIT_CPU`),
time (`SIGALRM`, not caught), file size. At most `AT_ONCE` readers run at the same time; others wait here.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from contextlib import suppress
from enum import StrEnum
from importlib import import_module
from typing import Any, get_type_hints

import msgspec

from rolltap.decoding import convert, from_json
from rolltap.errors import RolltapError, Unreadable

RUN = "from rolltap.untrusted.server import main; main()"
AT_ONCE = 4
ANSWER_BYTES = 32 << 20
END = b"\n"
"""Ends an answer. JSON has no line break of its own, and no NUL."""
REPORT = b"\0"
"""Begins the server's report of a reader that ended without a whole answer."""

REASONS = {
    signal.SIGALRM: "reading it takes too long",
    signal.SIGXCPU: "reading it takes too much processor time",
    signal.SIGXFSZ: "reading it writes too much",
    signal.SIGKILL: "the process that read it was killed; it or others took the machine's memory",
}


PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class AnswerKind(StrEnum):
    RESULT = "result"
    ERROR = "error"


class ReadLimits(msgspec.Struct, frozen=True):
    """A reader's limits. `memory_mb` comes on top of what the server itself has mapped; `seconds` on a busy machine may
    be long for its processor time, `cpu_s`."""

    memory_mb: int = 512
    file_mb: int = 256
    cpu_s: int = 120
    seconds: float = 300.0


class Question(msgspec.Struct, frozen=True):
    """A call of a function with `args`, a JSON list. `path`: the folders that modules are imported from."""

    module: str
    function: str
    args: str
    limits: ReadLimits
    path: list[str]


class Server:
    """Forks a reader for each connection and tells the asker how it ended, if it ended without an answer."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._waiting: deque[socket.socket] = deque()
        self._readers: dict[int, tuple[socket.socket, str]] = {}
        self._poll = select.poll()
        self._ended, self._child_ends = socket.socketpair()
        for each in (self._ended, self._child_ends):
            each.setblocking(False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._child_ends.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._ended, select.POLLIN)
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._ended.fileno():
                    with suppress(BlockingIOError):
                        self._ended.recv(4096)
                elif descriptor == self._control.fileno():
                    message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not message:
                        self._kill_readers()
                        return
                    self._waiting.extend(socket.socket(fileno=each) for each in descriptors)
                else:  # nobody waits for this answer any more
                    self._poll.unregister(descriptor)
                    gone = [pid for pid, (each, _) in self._readers.items() if each.fileno() == descriptor]
                    for pid in gone:
                        os.kill(pid, signal.SIGKILL)
            self._reap()
            while self._waiting and len(self._readers) < AT_ONCE:
                self._fork(self._waiting.popleft())

    def _fork(self, connection: socket.socket) -> None:
        try:
            scratch = tempfile.mkdtemp(prefix="rolltap-reader-")
            pid = os.fork()
        except OSError as error:  # no disk, or no process for it
            with connection, suppress(OSError):
                connection.send(REPORT + f"no process could be started for it: {error}".encode(), socket.MSG_DONTWAIT)
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for each in (self._control, self._ended, self._child_ends, *self._waiting):
                each.close()
            for other, _ in self._readers.values():
                other.close()
            _read(connection, scratch)
        self._readers[pid] = (connection, scratch)
        self._poll.register(connection, 0)  # only its end

    def _kill_readers(self) -> None:
        for pid, (connection, scratch) in self._readers.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            connection.close()
            shutil.rmtree(scratch, ignore_errors=True)

    def _reap(self) -> None:
        while self._readers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            connection, scratch = self._readers.pop(pid)
            with suppress(KeyError):
                self._poll.unregister(connection)
            with connection, suppress(OSError):
                if os.WIFSIGNALED(status):
                    number = signal.Signals(os.WTERMSIG(status))
                    reason = REASONS.get(number, f"the process that read it was ended by {number.name}")
                    connection.send(REPORT + reason.encode(), socket.MSG_DONTWAIT)
            shutil.rmtree(scratch, ignore_errors=True)


def _read(connection: socket.socket, scratch: str) -> None:
    """The life of a reader: limits, question, answer, end."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        tempfile.tempdir = scratch
        with open("/dev/null", "rb") as null:
            os.dup2(null.fileno(), 0)
        with connection.makefile("rb") as file:
            question = from_json(file.read(), Question)
        sys.path[:] = question.path
        _limit(question.limits)
        answer = _answer(question)
        connection.sendall(answer)
    finally:
        os._exit(0)


def _limit(limits: ReadLimits) -> None:
    with open("/proc/self/statm", "rb") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    bounds = {
        resource.RLIMIT_AS: mapped + (limits.memory_mb << 20),
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound + (kind == resource.RLIMIT_CPU)))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.seconds)


def _answer(question: Question) -> bytes:
    try:
        function: Any = import_module(question.module)
        for name in question.function.split("."):
            function = getattr(function, name)
        hints = get_type_hints(function)
        values = msgspec.json.decode(question.args)
        kinds = [kind for name, kind in hints.items() if name != "return"]
        pairs = zip(values, kinds, strict=False)
        result = function(*[convert(value, kind, lambda path, text: path(text)) for value, kind in pairs])
        return _packed(AnswerKind.RESULT, msgspec.json.encode(result))
    except RolltapError as error:
        return _packed(AnswerKind.ERROR, msgspec.json.encode((type(error).__name__, error.message)))
    except MemoryError:
        reason = f"reading it takes more than {question.limits.memory_mb} MB of memory"
    except Exception as error:  # noqa: BLE001  the boundary to an agent's files, which may make a reader raise anything
        reason = f"{type(error).__name__}: {error}"[:1000]
    return _packed(
        AnswerKind.ERROR, msgspec.json.encode((Unreadable.__name__, reason.encode("utf-8", "replace").decode()))
    )


def _packed(kind: AnswerKind, body: bytes) -> bytes:
    return kind.encode() + b" " + body + END


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in sys.argv[1:]:
        import_module(module)
    with socket.socket(fileno=os.dup(0)) as control:
        Server(control).serve()
