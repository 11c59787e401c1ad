"""An event loop in a thread of its own, for callers that block: also where another loop runs, as in a notebook."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines one after the other. What was pushed on `stack` is closed with it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rolltap-record", daemon=True)
        self._thread.start()
        self.stack = AsyncExitStack()
        atexit.register(self.close)  # a record that its user left open

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; interrupting it cancels it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the record is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Closing again changes nothing."""
        if self._loop.is_closed():
            return
        atexit.unregister(self.close)
        try:
            self.run(self.stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
