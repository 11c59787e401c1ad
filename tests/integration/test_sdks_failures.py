"""What every client meets when something is wrong: its own exception with the right status, retries that leave one
reply, and streams that end at once on both sides when their reader leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from rolltap.engine.scripted import Fault, Rule, Script, ScriptedReply
from rolltap.types import Outcome

from ..harnesses.house import House, Run
from .sdk_conversations import Anthropic, Conversation, OpenAIChat, OpenAIResponses
from .test_sdks_conversations import CLIENTS, every_client, pytestmark, shared_house, streamed_or_not

__all__ = ["pytestmark"]

CANCELLED_WITHIN_S = 0.1
NOISE = 5
"""How much longer a busy machine may take."""

BUSY = Fault(kind="status", status=429, retry_after=0.05, times=2)
SCRIPT = Script(
    rules=(
        Rule(when="Where?", turns=(ScriptedReply(say="Here.", fault=BUSY),)),
        Rule(when="Count.", turns=(ScriptedReply(say="one two three four five six", hold=6),)),
        Rule(when="Say it once.", turns=(ScriptedReply(say="Once.", hold=1),)),
    ),
    otherwise=ScriptedReply(say="Hello."),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    async with shared_house(SCRIPT, tmp_path_factory) as home:
        yield home


def status_of(error: BaseException | None) -> int | None:
    """The HTTP status that a client's exception names; LangChain and LiteLLM may wrap the vendor's own."""
    while error is not None:
        for name in ("status_code", "code"):
            if isinstance(value := getattr(error, name, None), int):
                return value
        error = error.__cause__ or error.__context__
    return None


async def refused(home: House, client: type[Conversation], stream: bool, **other: Any) -> int | None:
    """The status of a question with another key or model than the session's."""
    session = await home.open()
    async with AsyncExitStack() as closing:
        talk = client(replace(session.endpoint, **other), closing, stream=stream)
        with pytest.raises(Exception) as raised:  # every client has its own
            await talk.say("Hello?")
        return status_of(raised.value)


@every_client
@streamed_or_not
async def test_refusals_have_their_status(client: type[Conversation], stream: bool, home: House) -> None:
    async with AsyncExitStack() as closing:
        assert await refused(home, client, stream, key="rt-unknown") == 401
        assert await refused(home, client, stream, model="gardener") == 404
        session = await home.open()
        talk = client(session.endpoint, closing, stream=stream)
        await talk.say("Hello?")
        await home.client.close_session(session.session_id)
        with pytest.raises(Exception) as raised:
            await talk.say("Still there?")
        assert status_of(raised.value) == 409
        assert len(await home.app.call_log.rows(session.session_id)) == 1


@every_client
@streamed_or_not
async def test_a_busy_engine_is_waited_for(client: type[Conversation], stream: bool, home: House) -> None:
    """The engine asks twice to wait. Whether the proxy or the client tries again, one reply is trained."""
    async with AsyncExitStack() as closing:
        session = await home.open()
        talk = client(session.endpoint, closing, stream=stream, retries=3)
        asked = f"Where? {client.__name__}, {stream}"  # the engine counts its faults by prompt
        assert (await talk.say(asked)).text == "Here."
        run = await home.read(Run(session))
        assert [entry.outcome for entry in run.asked] == ["status", "status", "finished"]
        assert sum(call["outcome"] == Outcome.COMPLETED for call in run.calls) == 1
        assert run.report["segments"] == 1


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
async def test_a_reader_who_leaves_cancels_the_engine(
    client: type[Conversation], home: House, capsys: pytest.CaptureFixture[str]
) -> None:
    async with AsyncExitStack() as closing:
        session = await home.open()
        talk = client(session.endpoint, closing, stream=True)
        asking = asyncio.create_task(talk.say("Count."))
        await home.engine.journal.until(
            lambda entries: any(e.session == session.session_id and len(e.output) == 6 for e in entries)
        )
        left_at = time.perf_counter()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await home.engine.journal.until(
            lambda entries: any(e.session == session.session_id and e.outcome == "cancelled" for e in entries)
        )
        took = time.perf_counter() - left_at
        with capsys.disabled():
            print(f"\n{client.__name__}: the engine's request was cancelled {took * 1000:.1f} ms after its reader left")
        assert took < CANCELLED_WITHIN_S * NOISE
        await aborted(home, session.session_id)


async def aborted(home: House, session_id: str) -> None:
    """Returns when the session's only call is on record as aborted."""
    async with asyncio.timeout(20):
        while True:
            rows = await home.app.call_log.rows(session_id)
            if [row.call().outcome for row in rows if row.completion] == [Outcome.ABORTED]:
                return
            await asyncio.sleep(0.005)


class Balancer:
    """A TCP balancer in front of the proxy that drops its first client, but not what it asked for on its behalf."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0
        self._upstream: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        first = self.connections == 1
        answers, upstream = await asyncio.open_connection("127.0.0.1", self._port)
        self._upstream.append((answers, upstream))
        asked = asyncio.create_task(self._pass_on(reader, upstream))
        if first:
            self.drop = writer
            await asked
        else:
            await self._pass_on(answers, writer)
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()

    def close(self) -> None:
        for _, upstream in self._upstream:
            upstream.close()


@pytest.mark.parametrize("client", [OpenAIChat, OpenAIResponses, Anthropic], ids=lambda client: client.__name__)
@streamed_or_not
async def test_a_retry_joins_the_call_in_flight(client: type[Conversation], stream: bool, home: House) -> None:
    """The connection breaks between client and balancer while the engine works: the SDK's retry gets that reply."""
    async with AsyncExitStack() as closing:
        session = await home.open()
        host, path = session.endpoint.base_url.removeprefix("http://").split("/", 1)
        balancer = Balancer(int(host.rpartition(":")[2]))
        server = await asyncio.start_server(balancer, "127.0.0.1", 0)
        closing.push_async_callback(server.wait_closed)
        closing.callback(server.close)
        closing.callback(balancer.close)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/{path}"
        talk = client(replace(session.endpoint, base_url=url), closing, stream=stream, retries=2)
        asking = asyncio.create_task(talk.say("Say it once."))
        await home.engine.journal.until(lambda entries: any(e.session == session.session_id for e in entries))
        balancer.drop.transport.abort()
        live = await home.app.sessions.enter(session.endpoint.key, None)
        async with asyncio.timeout(20):
            while live.in_flight < 2:  # noqa: ASYNC110  the event is inside the proxy
                await asyncio.sleep(0.01)
        closing.callback(home.engine.hold)
        home.engine.release()
        assert (await asking).text == "Once."
        run = await home.read(Run(session))
        assert [entry.outcome for entry in run.asked] == ["finished"]
        assert [call["outcome"] for call in run.calls] == [Outcome.COMPLETED]
