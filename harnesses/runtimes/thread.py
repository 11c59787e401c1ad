"""The `thread` runtime: agents that are libraries, run in threads of the runner.

There is no isolation: an agent shares the runner's process and sees the machine. Use it for trusted agents and tiny
tasks. A call that does not stop when asked is abandoned with its thread, and `Exit.output` says so. Its session is
closed by then, so its later calls are not recorded as trainable.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from rolltap.errors import TaskInvalid
from rolltap.harnesses.base import Ending, Exit, Launch, Limits, PythonCall, RuntimeOptions, Source, refuse_image
from rolltap.harnesses.runtimes.folders import Folders, FolderWorkspace, make_folders
from rolltap.harnesses.threads import contained

GRACE_S = 5.0
"""Seconds that a call may take to stop."""


class ThreadWorkspace(FolderWorkspace):
    runtime = "thread"

    def __init__(self, folders: Folders, threads: ThreadPoolExecutor) -> None:
        super().__init__(folders)
        self._threads = threads

    async def run(self, launch: Launch, limits: Limits, timeout: float, *, reach: str = "") -> Exit:
        if not isinstance(launch, PythonCall):
            raise TaskInvalid("the runtime 'thread' runs Python calls only; use 'process' or 'bubblewrap'")
        stop = threading.Event()
        started = time.monotonic()
        call = asyncio.get_running_loop().run_in_executor(self._threads, lambda: contained(launch.run, stop))
        try:
            done, _ = await asyncio.wait({call}, timeout=timeout)
            if not done:
                stop.set()
                done, _ = await asyncio.wait({call}, timeout=GRACE_S)
        finally:
            stop.set()
        seconds = time.monotonic() - started
        if not done:
            return Exit(
                Ending.TIMED_OUT, seconds, output=f"did not stop within {GRACE_S:g} s; its thread is left behind"
            )
        ending, output = call.result()
        return Exit(Ending.TIMED_OUT if seconds > timeout else ending, seconds, output=output)


@dataclass(frozen=True, slots=True)
class ThreadRuntime:
    """`base`: the folder of the workspaces. At most `threads` calls run at once."""

    base: Path | None = None
    threads: int = 64
    name: str = "thread"
    launches: ClassVar[type[Launch]] = PythonCall
    _pool: ThreadPoolExecutor = field(init=False, repr=False)

    @classmethod
    def create(cls, options: RuntimeOptions) -> Self:
        refuse_image("thread", options.image)
        return cls(options.base)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pool", ThreadPoolExecutor(self.threads, thread_name_prefix="rollout"))

    async def prepare(self, source: Source) -> ThreadWorkspace:
        return ThreadWorkspace(await make_folders(self.base, source), self._pool)
