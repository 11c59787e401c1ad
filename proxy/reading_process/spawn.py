"""A process that the server starts, whose end can be awaited.

uvloop starts a process by a fork, and the event loop waits for it. A fork copies the page tables of a large server, and
runs the fork handlers of every loaded library in the child: one that waits for a lock there stops the loop for good.
`subprocess` uses vfork on Linux, which does neither.
"""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress


class Subprocess:
    """Starts `command`, which inherits the descriptors `pass_fds` and is given `line` on standard input.

    To be made on the event loop, which it blocks until the program runs, about 1 ms.
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
