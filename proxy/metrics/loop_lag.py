"""Measures the event loop's lag: whatever blocks the loop delays every call."""

from __future__ import annotations

import asyncio
import time

from rolltap.proxy.metrics.durations import Durations

EVERY_S = 0.5


async def watch_loop(lag: Durations) -> None:
    """Observes the delay of each timer, forever."""
    while True:
        due = time.perf_counter() + EVERY_S
        await asyncio.sleep(EVERY_S)
        lag.observe(max(0.0, time.perf_counter() - due))
