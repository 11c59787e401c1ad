"""Reading processes that are forked from one which has imported everything: 0.1 instead of 1.1 CPU seconds each.

Within `forked_readers()`, as all tests are, a server in this process starts its reading process so. What runs in it,
its socket, its settings and its end are the real ones. A server that is a process of its own starts it as users do; so
do tests with the fixture `started_reader`.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

READER = (sys.executable, "-m", "rolltap.proxy.reading_process.child")
"""The beginning of the command, unless a test has it start something else."""


class ForkServer:
    """A process that has imported the reading process's modules and forks one for each request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [READER[0], "-m", "tests.forked_readers", str(theirs.fileno())]
            root = Path(__file__).parents[1]
            self.process = subprocess.Popen(command, cwd=root, pass_fds=[theirs.fileno()])

    def fork(self, fds: Sequence[int]) -> int:
        """`fds`: what the process has as standard input, its listening socket, and where its end is written."""
        with self._lock:
            socket.send_fds(self._socket, [b"f"], list(fds))
            return int.from_bytes(self._socket.recv(4), "little")

    def close(self) -> None:
        self._socket.close()
        self.process.wait()


class ForkedReader:
    """What `Subprocess` uses of a `Popen`."""

    def __init__(self, server: ForkServer, pass_fds: Sequence[int]) -> None:
        stdin, writable = os.pipe2(os.O_CLOEXEC)
        self._ended, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = server.fork([stdin, pass_fds[0], theirs])
        finally:
            os.close(stdin)
            os.close(theirs)
        self.stdin = open(writable, "wb", buffering=0)  # noqa: SIM115 - closed by its owner, as Popen's is
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        with self._waiting:
            if self.returncode is None:
                status = os.read(self._ended, 4)  # nothing: the fork server has ended, and with it the reader
                os.close(self._ended)
                self.returncode = os.waitstatus_to_exitcode(int.from_bytes(status, "little")) if status else -9
            return self.returncode


@cache
def fork_server() -> ForkServer:
    """This process's, started with the first question to a reading process."""
    server = ForkServer()
    atexit.register(server.close)
    return server


@contextmanager
def forked_readers() -> Iterator[None]:
    from rolltap.proxy.reading_process import process

    def popen(command: Sequence[str], *, pass_fds: Sequence[int], **more: Any) -> Any:
        if tuple(command[:3]) != READER:
            return subprocess.Popen(command, pass_fds=pass_fds, **more)
        if fork_server().process.poll() is not None:  # a test ended all that this process had started
            fork_server.cache_clear()
        return ForkedReader(fork_server(), pass_fds)

    before = process.subprocess
    process.subprocess = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    try:
        yield
    finally:
        process.subprocess = before


def main(requests: socket.socket) -> None:
    """Forks a reader for each request, until the other end closes."""
    from rolltap.proxy.reading_process import child

    gc.freeze()
    ended_r, ended_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(ended_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    status_fds: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([requests, ended_r], [], [])
        if ended_r in readable:
            os.read(ended_r, 4096)
            while status_fds:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with suppress(BrokenPipeError):  # nobody waits for it
                    os.write(status_fds[pid], status.to_bytes(4, "little"))
                os.close(status_fds.pop(pid))
        if requests in readable:
            message, fds, _, _ = socket.recv_fds(requests, 1, 3)
            if not message:
                for pid in status_fds:
                    os.kill(pid, signal.SIGKILL)
                return
            pid = os.fork()
            if pid == 0:
                break
            os.close(fds[0])
            os.close(fds[1])
            status_fds[pid] = fds[2]
            requests.sendall(pid.to_bytes(4, "little"))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in (requests.fileno(), ended_r, ended_w, fds[2], *status_fds.values()):
        os.close(fd)
    requests.detach()
    os.dup2(fds[0], 0)
    os.close(fds[0])
    sys.argv = [child.__file__, str(fds[1])]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the process
    child.main()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
