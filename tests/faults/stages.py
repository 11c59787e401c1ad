"""The unusual surroundings of some scenarios: a small disk, a slow store, a stream in pieces, a short spool."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from .processes import EngineProcess
from .relay import relayed
from .world import Bench, Stage

DISK = "16m"


@asynccontextmanager
async def plain(bench: Bench) -> AsyncIterator[Stage]:
    yield Stage()


@asynccontextmanager
async def short_spool(bench: Bench) -> AsyncIterator[Stage]:
    yield Stage(store={"spool_mb": 1})


@asynccontextmanager
async def small_disk(bench: Bench) -> AsyncIterator[Stage]:
    """A tmpfs of 16 MB holds the data folder. Only root may mount one."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    mounted = await asyncio.to_thread(
        subprocess.run,
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.fail(f"the full disk is a tmpfs, which can't be mounted here: {mounted.stderr.strip()}; run as root")
    try:
        yield Stage(folder=folder, store={"spool_mb": 1})
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "--lazy", str(folder)], check=True)


@asynccontextmanager
async def slow_postgres(bench: Bench) -> AsyncIterator[Stage]:
    url = await bench.database()
    async with relayed("127.0.0.1", bench.postgres.port) as relay:
        through = url.replace(f":{bench.postgres.port}/", f":{relay.own_port}/")
        yield Stage(url=url, store={"url": through}, relay=relay)


@asynccontextmanager
async def split_stream(bench: Bench) -> AsyncIterator[Stage]:
    """What the engine says arrives a byte at a time."""
    engine = await asyncio.to_thread(lambda: bench.part(EngineProcess))
    async with relayed("127.0.0.1", urlsplit(engine.url).port or 0, piece=1) as relay:
        yield Stage(engine_url=f"http://127.0.0.1:{relay.own_port}", relay=relay)
