"""A real router of vLLM or SGLang, as a process, in front of scripted engines.

`scripts/routers.sh` installs both into `.cache/engines`, in an environment of their own.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from rolltap.engine.scripted import Script, ScriptedEngine, ServedModel
from rolltap.engine.tiny import FOLDER

from ..conftest import ROOT, free_port

ENVIRONMENT = ROOT / ".cache" / "engines" / "routers-0.1.17-0.3.2"
PROGRAMS = {"vllm": ["vllm-router"], "sglang": ["smg", "launch"]}
STICKY = {"vllm": "consistent_hash", "sglang": "manual"}
"""Each router's policy that follows the session header which rolltap sends."""

START_S = 60.0


def install() -> None:
    subprocess.run([ROOT / "scripts" / "routers.sh", ENVIRONMENT], check=True)


@asynccontextmanager
async def router(kind: str, urls: Sequence[str], *flags: str) -> AsyncIterator[str]:
    """A running router of `kind` in front of `urls`; yields its URL when it has them all."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    listening = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    program, *command = PROGRAMS[kind]
    with tempfile.TemporaryFile() as log:
        arguments = [*command, *listening, "--worker-urls", *urls, *flags]
        process = await asyncio.create_subprocess_exec(
            ENVIRONMENT / "bin" / program, *arguments, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
                while not await _is_up(http, url):
                    if process.returncode is not None:
                        log.seek(0)
                        raise RuntimeError(f"{program} ended: {log.read().decode(errors='replace')[-2000:]}")
                    await asyncio.sleep(0.1)
            yield url
        finally:
            process.kill()
            await process.wait()


async def _is_up(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/v1/models") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


@asynccontextmanager
async def scripted_engines(kind: str, script: Script, context: int = 1 << 20) -> AsyncIterator[list[ScriptedEngine]]:
    """Four scripted engines."""
    async with AsyncExitStack() as stack:
        engines = [ScriptedEngine(script, FOLDER, wire=kind, served=ServedModel(context=context)) for _ in range(4)]
        yield [await stack.enter_async_context(engine) for engine in engines]
