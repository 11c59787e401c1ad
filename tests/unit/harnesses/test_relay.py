"""The relay between a sandbox's listener and the proxy."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import pytest

from rolltap.harnesses.runtimes.relay import Relay, Target


async def test_it_leaves_no_connection_behind() -> None:
    """The proxy has not answered yet when the sandbox ends: nothing waits for it any more."""
    asked = asyncio.Event()

    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await reader.read()
        writer.close()

    proxy = await asyncio.start_server(stay_silent, "127.0.0.1", 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        async with proxy, Relay(ours, Target("127.0.0.1", proxy.sockets[0].getsockname()[1], tls=False)):
            socket.send_fds(theirs, [b"x"], [listener.fileno()])
            agent_reader, agent_writer = await asyncio.open_connection(*listener.getsockname())
            agent_writer.write(b"x")
            async with asyncio.timeout(20):
                await asked.wait()
    assert await agent_reader.read() == b""
    agent_writer.close()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        assert "Relay" not in repr(task.get_coro())


async def test_connections_that_wait_for_their_turn_are_closed_with_the_sandbox() -> None:
    """A flood's end: most of its connections have not been connected to the proxy yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        async with Relay(ours, Target("127.0.0.1", 9, tls=False)) as relay:
            relay._pace._used_until = asyncio.get_running_loop().time() + 60
            socket.send_fds(theirs, [b"x"], [listener.fileno()])
            agents = [await asyncio.open_connection(*listener.getsockname()) for _ in range(3)]
            async with asyncio.timeout(20):
                while len(relay._connections) < len(agents):  # noqa: ASYNC110  no event says so
                    await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            for reader, writer in agents:
                assert await reader.read() == b""
                writer.close()


@pytest.mark.parametrize("steps", [0, 2, 3, 4])  # at 1 asyncio itself drops the socket, until it is collected
async def test_a_connection_that_is_just_accepted_ends_with_the_sandbox(steps: int) -> None:
    """`steps` of the event loop lie between the agent's connection and the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    listener = socket.create_server(("127.0.0.1", 0))
    with theirs:
        async with Relay(ours, Target("127.0.0.1", 9, tls=False)) as relay:
            relay._pace._used_until = asyncio.get_running_loop().time() + 60
            socket.send_fds(theirs, [b"x"], [listener.fileno()])
            async with asyncio.timeout(20):
                (await asyncio.open_connection(*listener.getsockname()))[1].close()
                while not relay._connections:  # noqa: ASYNC110  no event says so
                    await asyncio.sleep(0.01)
            agent = socket.create_connection(listener.getsockname(), 5)
            listener.close()
            for _ in range(steps):
                await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        with agent, suppress(ConnectionResetError):
            agent.setblocking(False)
            assert agent.recv(1) == b""
    assert not relay._connections
