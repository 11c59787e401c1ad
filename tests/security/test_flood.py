"""One agent that floods its way to the proxy: a sibling's calls beside it, from another sandbox of the same runner."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from rolltap.harnesses.base import Command, Ending, Exit, Limits, Workspace
from rolltap.harnesses.runtimes.bubblewrap import INTERPRETER, BubblewrapRuntime
from rolltap.harnesses.runtimes.sources import Files

P99_S = 1.0
"""Without a pace for each sandbox the calls did not end within 40 s, on two cores that others used, too."""

SERVER = """\
import asyncio

async def serve(reader, writer):
    try:
        while True:
            await reader.readexactly(int(await reader.readexactly(64)))
            writer.write(b"y" * 1000)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""Answers each request, a length of 64 digits and so many bytes, with 1,000 bytes."""

FLOOD = """\
import asyncio, sys
async def one(port):
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async def read():
                while await reader.read(1 << 16):
                    pass
            reading = asyncio.create_task(read())
            while True:
                writer.write(b"%064d" % 100_000 + b"x" * 100_000)
                await writer.drain()
        except OSError:
            await asyncio.sleep(0.01)

async def main(port):
    open("flooding", "w").close()
    await asyncio.gather(*(one(port) for _ in range(200)))

asyncio.run(main(int(sys.argv[1])))
"""
CALLS = """\
import json, socket, sys, time
seconds = []
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
for _ in range(200):
    began = time.perf_counter()
    connection.sendall(b"%064d" % 2000 + b"x" * 2000)
    left = 1000
    while left:
        left -= len(connection.recv(left))
    seconds.append(time.perf_counter() - began)
print(json.dumps(sorted(seconds)))
"""


async def test_an_agent_that_floods_the_relay_does_not_starve_a_sibling(tmp_path: Path) -> None:
    server = await asyncio.create_subprocess_exec(sys.executable, "-c", SERVER, stdout=asyncio.subprocess.PIPE)
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    reach, runtime = f"http://127.0.0.1:{port}", BubblewrapRuntime(tmp_path)
    hostile, honest = await runtime.prepare(Files({})), await runtime.prepare(Files({}))

    async def run(workspace: Workspace, script: str, timeout: float) -> Exit:
        command = Command((INTERPRETER, "-c", script, str(port)))
        return await workspace.run(command, Limits(), timeout, reach=reach)

    flood = asyncio.create_task(run(hostile, FLOOD, 60))
    try:
        while not (hostile.folder / "flooding").exists():  # noqa: ASYNC110  the sandbox has no other way to say so
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        exit_ = await run(honest, CALLS, 40)
        assert exit_.ending is Ending.DONE, exit_.output
        seconds = json.loads(exit_.output)
        assert seconds[int(len(seconds) * 0.99)] < P99_S
    finally:
        flood.cancel()
        await asyncio.gather(flood, return_exceptions=True)
        await hostile.close()
        await honest.close()
        server.kill()
        await server.wait()
