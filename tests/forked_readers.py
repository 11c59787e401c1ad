"""Reading processes that are forked from one which has imported everything: 0.1 instead of 1.1 CPU seconds each.

Within `forked_readers()`, as all tests are, a server in this process starts its reading process so. What runs in it,
its socket, its settings and its end are the real ones. A server that is a process of its own starts it as users do; so
do tests with the fixture `started_reader`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from .fork_server import ForkedProcess, fork_server, serve_forks

READER = (sys.executable, "-m", "rolltap.proxy.reading_process.child")
"""The beginning of the command, unless a test has it start something else."""


class ForkedReader(ForkedProcess):
    """What `Subprocess` uses of a `Popen`."""

    def __init__(self, pass_fds: Sequence[int]) -> None:
        stdin, writable = os.pipe2(os.O_CLOEXEC)
        try:
            super().__init__(fork_server("tests.forked_readers"), b"reader", [stdin, pass_fds[0]])
        finally:
            os.close(stdin)
        self.stdin = open(writable, "wb", buffering=0)  # noqa: SIM115 - closed by its owner, as Popen's is


@contextmanager
def forked_readers() -> Iterator[None]:
    from rolltap.proxy.reading_process import process

    def popen(command: Sequence[str], *, pass_fds: Sequence[int], **more: Any) -> Any:
        if tuple(command[:3]) != READER:
            return subprocess.Popen(command, pass_fds=pass_fds, **more)
        return ForkedReader(pass_fds)

    before = process.subprocess
    process.subprocess = SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE)  # type: ignore[assignment]
    try:
        yield
    finally:
        process.subprocess = before


def main(requests: socket.socket) -> None:
    from rolltap.proxy.reading_process import child

    _, (stdin, listening) = serve_forks(requests)
    os.dup2(stdin, 0)
    os.close(stdin)
    sys.argv = [child.__file__, str(listening)]
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as the process
    child.main()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
