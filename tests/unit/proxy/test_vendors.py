"""Passthrough end to end: a harness with its own vendor key, the real proxy, and an emulated vendor behind it."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rolltap.proxy.app import Rolltap
from rolltap.proxy.server import bind, serve
from rolltap.settings import Settings
from rolltap.types import Finish, Flaw, Outcome

from .vendor_wires import ANTHROPIC, CHAT, KEY, WIRES, Wire

each_wire = pytest.mark.parametrize("name", list(WIRES))


@dataclass
class Vendor:
    """Answers as it is told; remembers what it was asked. `stop_after` events of a stream it waits for `go`."""

    wire: Wire
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    stop_after: int | None = None
    dies: bool = False
    seen: list[tuple[web.Request, bytes]] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request, body))
        if self.body is not None:
            return web.Response(body=self.body, status=self.status, headers=self.headers)
        if not (b'"stream": true' in body or b'"stream":true' in body or "streamGenerate" in request.path):
            return web.json_response(self.wire.whole)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-request-id": "r1"})
        await response.prepare(request)
        for at, event in enumerate(self.wire.events):
            if at == self.stop_after:
                await self._pause(request)
            await response.write(event)
        return response

    async def _pause(self, request: web.Request) -> None:
        if self.dies:
            assert request.transport is not None
            request.transport.abort()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise


@dataclass
class Stage:
    """The proxy, its vendor and a client."""

    app: Rolltap
    vendor: Vendor
    client: httpx.AsyncClient
    wire: Wire

    def request(self, *more: Any, stream: bool = False, prefix: str = "", **headers: str) -> httpx.Request:
        ask = {**self.wire.ask, **(self.wire.stream if stream else {})}
        ask[self.wire.history] = [*ask[self.wire.history], *more]
        path = prefix + (self.wire.stream_path if stream else self.wire.path)
        url = f"{path}?{self.wire.query}" if self.wire.query else path
        return self.client.build_request("POST", url, json=ask, headers={**self.wire.headers, **headers})

    async def post(self, *more: Any, **options: Any) -> httpx.Response:
        return await self.client.send(self.request(*more, **options))

    async def rows(self) -> list[Any]:
        return [
            row for session in await self.app.call_log.sessions() for row in await self.app.call_log.rows(session.id)
        ]


def files_of(folder: Path) -> list[bytes]:
    """What the database, its journal, the spool and all other files hold."""
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


@asynccontextmanager
async def staged(
    folder: Path, name: str, *, engine: Any = None, policy: Any = None, settings: Any = None, **vendor: Any
) -> AsyncIterator[Stage]:
    """The real proxy on a port of its own before an emulated vendor of the dialect `name`."""
    behind = Vendor(WIRES[name], **vendor)
    web_app = web.Application()
    web_app.router.add_route("*", "/{tail:.*}", behind.answer)
    server = TestServer(web_app)
    await server.start_server()
    whole = Settings.model_validate(
        {
            "data": folder,
            **(settings or {}),
            "engines": {"vendor": {"kind": "passthrough", "url": str(server.make_url("/")), **(engine or {})}},
            "policies": {"theirs": {"engine": "vendor", **(policy or {})}},
        }
    )
    async with Rolltap.running(whole) as app:
        socket, stop = bind("127.0.0.1", 0), asyncio.Event()
        serving = asyncio.create_task(serve({"agent": (app.planes["agent"], socket)}, stop))
        base = f"http://127.0.0.1:{socket.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=base, timeout=30) as client:
                yield Stage(app, behind, client, WIRES[name])
        finally:
            behind.go.set()
            stop.set()
            await serving
            await server.close()


@each_wire
@pytest.mark.parametrize("stream", [False, True])
async def test_a_task_of_two_calls_goes_to_the_vendor_and_is_one_session(
    tmp_path: Path, name: str, stream: bool
) -> None:
    async with staged(tmp_path, name) as stage:
        first = await stage.post(stream=stream)
        second = await stage.post(*stage.wire.echo, stream=stream)
        await stage.app.services.recorder.drain()
        (session,) = await stage.app.call_log.sessions()
        one, two = await stage.rows()
        (asked, body), _ = stage.vendor.seen
    told = b"".join(stage.wire.events) if stream else json.dumps(stage.wire.whole).encode()
    assert (first.status_code, first.content, second.content) == (200, told, told)
    assert json.loads(body)[stage.wire.history] == stage.wire.ask[stage.wire.history]
    assert (asked.path, asked.query_string) == (stage.wire.stream_path if stream else stage.wire.path, stage.wire.query)
    assert {name: asked.headers[name] for name in stage.wire.headers} == stage.wire.headers
    assert session.policy == "theirs"
    assert two.intent.parent_id == one.intent.id
    for row in (one, two):
        done = row.completion
        assert (done.outcome, done.finish, done.flaw) == (Outcome.COMPLETED, Finish.TOOL_CALLS, Flaw.TOKENS_MISSING)
        assert not row.call().trainable
        said = json.loads(done.message)
        assert "".join(part.get("text", "") for part in said["parts"]) == "I look."
        assert [(call["name"], json.loads(call["arguments"])) for call in said["tool_calls"]] == [
            ("bash", {"command": "ls"})
        ]
        assert (done.usage["prompt"], done.usage["output"]) == (11, 7)
        assert row.delivered


@each_wire
async def test_a_stream_comes_as_it_is_sent_and_its_end_waits_for_the_record(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = asyncio.Event()
    async with staged(tmp_path, name, stop_after=WIRES[name].closing) as stage:
        append = stage.app.call_log.append_completion

        async def held(completion: Any) -> None:
            await recorded.wait()
            await append(completion)

        monkeypatch.setattr(stage.app.call_log, "append_completion", held)
        answer = await stage.client.send(stage.request(stream=True), stream=True)
        pieces = answer.aiter_raw()
        early = b"".join(stage.wire.events[: stage.wire.closing])
        got = b""
        while len(got) < len(early):
            got += await anext(pieces)
        assert got == early
        assert [row.completion for row in await stage.rows()] == [None]
        stage.vendor.go.set()
        rest = asyncio.ensure_future(anext(pieces))
        done, _ = await asyncio.wait([rest], timeout=0.2)
        assert not done
        recorded.set()
        got += await rest
        async for piece in pieces:
            got += piece
        await answer.aclose()
    assert got == b"".join(stage.wire.events)


@each_wire
@pytest.mark.parametrize(("status", "after"), [(401, None), (429, "17"), (529, None)])
async def test_the_vendors_errors_go_through_unchanged(
    tmp_path: Path, name: str, status: int, after: str | None
) -> None:
    said = json.dumps({"error": {"message": f"no: {KEY}"}}).encode()
    headers = {"content-type": "application/json", "x-request-id": "r7", **({"retry-after": after} if after else {})}
    async with staged(tmp_path, name, status=status, body=said, headers=headers) as stage:
        answer = await stage.post(stream=True)
        (row,) = await stage.rows()
    assert (answer.status_code, answer.content) == (status, said)
    assert (answer.headers["x-request-id"], answer.headers.get("retry-after")) == ("r7", after)
    assert row.completion.outcome is Outcome.ENGINE_ERROR
    assert str(status) in row.completion.error
    assert KEY not in row.completion.error
    assert len(stage.vendor.seen) == 1


@each_wire
async def test_a_vendor_that_dies_halfway_cuts_the_client_off(tmp_path: Path, name: str) -> None:
    async with staged(tmp_path, name, stop_after=1, dies=True) as stage:
        with pytest.raises(httpx.RemoteProtocolError):
            await stage.post(stream=True)
        (row,) = await stage.rows()
    assert row.completion.outcome is Outcome.ENGINE_ERROR
    assert "closed the connection" in row.completion.error


@each_wire
async def test_a_client_that_leaves_ends_the_vendors_call(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: asyncio.Queue[Any] = asyncio.Queue()
    async with staged(tmp_path, name, stop_after=1) as stage:
        monkeypatch.setattr(stage.app.call_log, "append_completion", written.put)
        answer = await stage.client.send(stage.request(stream=True), stream=True)
        await anext(answer.aiter_raw())
        await answer.aclose()
        async with asyncio.timeout(20):
            await stage.vendor.left.wait()
            completion = await written.get()
    assert completion.outcome is Outcome.ABORTED


@each_wire
async def test_the_key_is_nowhere(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with staged(tmp_path, name) as stage:
        await stage.post()
        await stage.post(stream=True)
        stage.vendor.body, stage.vendor.status = json.dumps({"error": {"message": f"bad key {KEY}"}}).encode(), 401
        await stage.post()
        stage.vendor.status = 500
        await stage.post()
        assert len(stage.vendor.seen) == 4
        kept = await asyncio.to_thread(files_of, tmp_path)
        kept.append(repr(await stage.rows()).encode())  # as it is without its compression
    kept += await asyncio.to_thread(files_of, tmp_path)
    assert any(b"the vendor answered 401" in data for data in kept)
    traces = (KEY.encode(), sha256(KEY.encode()).digest(), sha256(KEY.encode()).hexdigest().encode())
    assert not any(trace in data for data in kept for trace in traces)
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore", "aiohttp.access"))]
    assert not any(KEY in record.getMessage() or KEY in str(record.exc_text) for record in ours)


async def test_a_session_is_named_by_the_url_and_by_the_harness(tmp_path: Path) -> None:
    async with staged(tmp_path, "anthropic") as stage:
        opened, key = await stage.app.services.sessions.open()
        assert (await stage.post(prefix=f"/s/{key}")).status_code == 200
        assert len(await stage.app.call_log.rows(opened.id)) == 1
        await asyncio.gather(*(stage.post(**{"x-claude-code-session-id": "conversation"}) for _ in range(3)))
        (named,) = [one for one in await stage.app.call_log.sessions() if one.id != opened.id]
        assert len(await stage.app.call_log.rows(named.id)) == 3
        await stage.app.services.sessions.close(named.id)
        assert (await stage.post(**{"x-claude-code-session-id": "conversation"})).status_code == 200
        assert len(await stage.app.call_log.sessions()) == 3
        assert (await stage.post(prefix="/s/nosuchsession")).status_code == 401
        await stage.app.services.sessions.close(opened.id)
        assert (await stage.post(prefix=f"/s/{key}")).status_code == 409
        refused = await stage.post(**{"x-api-key": key})
        assert refused.status_code == 409
    assert len(stage.vendor.seen) == 5


async def test_away_from_loopback_a_vendors_key_needs_a_session(tmp_path: Path) -> None:
    exposed = {
        "listen": {"host": "0.0.0.0"},
        "keys": {role: f"rt-{role}-{secrets.token_hex(16)}" for role in ("admin", "trainer")},
    }
    async with staged(tmp_path, "anthropic", settings=exposed) as stage:
        assert (await stage.post()).status_code == 401
        opened, key = await stage.app.services.sessions.open()
        assert (await stage.post(prefix=f"/s/{opened.id}")).status_code == 401
        assert (await stage.post(prefix=f"/s/{key}")).status_code == 200
    assert len(stage.vendor.seen) == 1


async def test_who_knows_a_sessions_id_can_not_write_into_it(tmp_path: Path) -> None:
    """A session's id is no secret. Under a vendor's key the URL holds the session's own key instead."""
    async with staged(tmp_path, "anthropic") as stage:
        opened, _ = await stage.app.services.sessions.open()
        answer = await stage.post(prefix=f"/s/{opened.id}", **{"x-api-key": "sk-junk"})
        assert not await stage.app.call_log.rows(opened.id)
    assert answer.status_code == 401
    assert not stage.vendor.seen


async def test_calls_beyond_the_limit_are_refused_and_recorded(tmp_path: Path) -> None:
    async with staged(tmp_path, "anthropic", settings={"limits": {"calls_at_once": 1}}, stop_after=1) as stage:
        _, key = await stage.app.services.sessions.open()
        first = await stage.client.send(stage.request(stream=True, prefix=f"/s/{key}"), stream=True)
        pieces = first.aiter_raw()
        await anext(pieces)
        assert (await stage.post(prefix=f"/s/{key}")).status_code == 429
        refused = [row for row in await stage.rows() if row.completion is not None]
        await first.aclose()
    assert [row.completion.outcome for row in refused] == [Outcome.REFUSED]
    assert len(stage.vendor.seen) == 1


async def test_a_key_of_ours_never_reaches_a_vendor(tmp_path: Path) -> None:
    async with staged(tmp_path, "anthropic") as stage:
        _, key = await stage.app.services.sessions.open()
        keys = stage.app.settings.keys
        answers = [await stage.post(**{"x-api-key": one}) for one in (key, keys.project, keys.admin, keys.trainer)]
    assert [answer.status_code for answer in answers] == [401, 401, 401, 401]
    assert "the vendor's own key" in answers[0].json()["error"]["message"]
    assert not stage.vendor.seen


async def test_tokens_are_not_counted_for_who_may_not_call(tmp_path: Path) -> None:
    """A token count is refused where the call itself is."""
    async with staged(tmp_path, "anthropic") as stage:
        _, key = await stage.app.services.sessions.open()
        headers = {**stage.wire.headers, "x-api-key": key}
        counted = await stage.client.post("/v1/messages/count_tokens", json=stage.wire.ask, headers=headers)
        called = await stage.post(**{"x-api-key": key})
    assert (counted.status_code, counted.json()) == (called.status_code, called.json())
    assert called.status_code == 401
    assert not stage.vendor.seen


async def test_a_vendors_key_in_the_settings_is_used_by_our_keys_only(tmp_path: Path) -> None:
    async with staged(tmp_path, "anthropic", engine={"api_key": "sk-of-the-settings"}) as stage:
        assert (await stage.post()).status_code == 401
        assert (await stage.post(**{"x-api-key": stage.app.settings.keys.project})).status_code == 200
        opened, key = await stage.app.services.sessions.open()
        assert (await stage.post(**{"x-api-key": key})).status_code == 200
        assert len(await stage.app.call_log.rows(opened.id)) == 1
    assert [asked.headers["x-api-key"] for asked, _ in stage.vendor.seen] == ["sk-of-the-settings"] * 2


async def test_what_makes_no_call_is_passed_on_and_not_recorded(tmp_path: Path) -> None:
    async with staged(tmp_path, "anthropic", body=b'{"input_tokens": 5}') as stage:
        counted = await stage.client.post("/v1/messages/count_tokens", json=stage.wire.ask, headers=stage.wire.headers)
        listed = await stage.client.get("/v1/models?limit=9", headers=stage.wire.headers)
        assert not await stage.app.call_log.sessions()
    assert counted.content == listed.content == b'{"input_tokens": 5}'
    assert [asked.path_qs for asked, _ in stage.vendor.seen] == ["/v1/messages/count_tokens", "/v1/models?limit=9"]


async def test_a_key_goes_to_the_vendor_of_its_protocol_only(tmp_path: Path) -> None:
    async with staged(tmp_path, "openai_chat", engine={"dialects": ["openai_chat"]}) as stage:
        listed = await stage.client.get("/v1/models", headers=ANTHROPIC.headers)
        asked = await stage.client.post("/v1/messages", json=ANTHROPIC.ask, headers=ANTHROPIC.headers)
    assert (listed.status_code, asked.status_code) == (401, 401)
    assert not stage.vendor.seen


async def test_a_request_that_only_the_vendor_understands_is_relayed_and_kept_as_text(tmp_path: Path) -> None:
    async with staged(tmp_path, "openai_chat") as stage:
        ask = {**CHAT.ask, "a_field_of_next_year": True}
        answer = await stage.client.post(CHAT.path, json=ask, headers=CHAT.headers)
        (row,) = await stage.rows()
        kept = await stage.app.call_log.request(row.intent.id)
    assert answer.json() == CHAT.whole
    assert json.loads(json.loads(kept.head)["unread"]) == ask
    assert row.completion.outcome is Outcome.COMPLETED


async def test_a_vendor_that_is_down_is_an_error_of_the_dialect(tmp_path: Path) -> None:
    async with staged(tmp_path, "anthropic", engine={"url": "http://127.0.0.1:9"}) as stage:
        answer = await stage.post()
        (row,) = await stage.rows()
    assert (answer.status_code, answer.json()["type"]) == (503, "error")
    assert row.completion.outcome is Outcome.ENGINE_ERROR
