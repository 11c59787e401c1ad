"""How late the event loop is: what holds it up holds up every call."""

from __future__ import annotations

import asyncio
import time

from rolltap.proxy.metrics.durations import Durations

EVERY_S = 0.5


async def watch_loop(lag: Durations) -> None:
    """Observes for ever by how much each timer is late."""
    while True:
        due = time.perf_counter() + EVERY_S
        await asyncio.sleep(EVERY_S)
        lag.observe(max(0.0, time.perf_counter() - due))
