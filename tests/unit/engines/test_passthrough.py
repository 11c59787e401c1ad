"""A vendor's bytes come back as they are, and nobody's key is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rolltap.errors import EngineTimeout, EngineUnavailable, InvalidRequest
from rolltap.proxy.engines.passthrough import NativeRequest, PassthroughUpstream
from rolltap.settings import EngineSettings
from tests.dialects import DIALECTS

KEY = "sk-users-own-key"


class Vendor:
    """Answers with what it was sent; `/v1/stream` sends events, `/v1/hang` stops after the first."""

    def __init__(self) -> None:
        self.seen: list[web.Request] = []
        self.left = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self.answer)
        self.server = TestServer(app)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        body = await request.read()
        if request.path in ("/v1/stream", "/v1/hang"):
            response = web.StreamResponse(headers={"content-type": "text/event-stream", "set-cookie": "a=b"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            try:
                if request.path == "/v1/hang":
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.left.set()
                raise
            await response.write(b"data: 2\n\n")
            return response
        status = int(request.query.get("status", 200))
        return web.Response(body=body, status=status, headers={"x-request-id": "r1", "retry-after": "3"})


@pytest.fixture
async def vendor() -> AsyncIterator[Vendor]:
    vendor = Vendor()
    await vendor.server.start_server()
    yield vendor
    await vendor.server.close()


def upstream(vendor: Vendor, http: aiohttp.ClientSession, **fields: Any) -> PassthroughUpstream:
    settings = {"kind": "passthrough", "url": str(vendor.server.make_url("/v1")), **fields}
    return PassthroughUpstream("vendor", EngineSettings.model_validate(settings), http, DIALECTS)


def post(path: str, **fields: Any) -> NativeRequest:
    headers = {"authorization": f"Bearer {KEY}", "anthropic-beta": "x", "host": "evil", "cookie": "c=d"}
    return NativeRequest("POST", path, **{"headers": headers, "body": b'{"a": 1}', **fields})


async def read(upstream: PassthroughUpstream, request: NativeRequest) -> tuple[Any, bytes]:
    async with upstream.relay(request) as reply:
        return reply, b"".join([chunk async for chunk in reply.chunks])


@pytest.mark.parametrize("status", [200, 400, 429, 500])
async def test_bytes_and_status_are_the_vendors(vendor: Vendor, http: aiohttp.ClientSession, status: int):
    reply, body = await read(upstream(vendor, http), post("/v1/messages", query={"status": str(status)}))
    assert (reply.status, body) == (status, b'{"a": 1}')
    assert (reply.headers["x-request-id"], reply.headers["retry-after"]) == ("r1", "3")
    (seen,) = vendor.seen
    assert seen.headers["authorization"] == f"Bearer {KEY}"
    assert seen.headers["anthropic-beta"] == "x"
    assert seen.headers["host"] != "evil"
    assert "cookie" not in seen.headers


async def test_a_stream_comes_as_it_is_sent(vendor: Vendor, http: aiohttp.ClientSession):
    reply, body = await read(upstream(vendor, http), post("/v1/stream"))
    assert body == b"data: 1\n\ndata: 2\n\n"
    assert reply.complete
    assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("name", ["x-api-key", "authorization", "x-goog-api-key", "api-key"])
def test_no_key_is_in_what_is_said_of_a_request(name: str):
    value = f"Bearer {KEY}" if name == "authorization" else KEY
    request = NativeRequest("POST", "/v1/messages", headers={name: value, "user-agent": "u"})
    assert request.without_key(f"no key {KEY} from u") == "no key [key] from u"
    request = NativeRequest("POST", "/v1beta/models/m:generateContent", query={"key": KEY})
    assert request.without_key(f"https://vendor/?key={KEY}") == "https://vendor/?key=[key]"


async def test_a_key_in_the_settings_takes_the_place_of_the_users(vendor: Vendor, http: aiohttp.ClientSession):
    ours = upstream(vendor, http, api_key="ours")
    await read(ours, post("/v1/messages"))
    await read(ours, post("/v1/messages", headers={"x-api-key": KEY}))
    await read(ours, post("/v1beta/models/m:generateContent", headers={}, query={"key": KEY}))
    bearer, header, parameter = vendor.seen
    assert bearer.headers["authorization"] == "Bearer ours"
    assert (header.headers["x-api-key"], "authorization" in header.headers) == ("ours", False)
    assert parameter.query["key"] == "ours"


@pytest.mark.parametrize("path", ["v1/x", "//evil/v1", "/v1/../admin", "http://evil/", "/v1\\..\\admin"])
async def test_only_the_vendors_paths(vendor: Vendor, http: aiohttp.ClientSession, path: str):
    with pytest.raises(InvalidRequest):
        await read(upstream(vendor, http), post(path))
    assert not vendor.seen


async def test_leaving_closes_the_vendors_connection(vendor: Vendor, http: aiohttp.ClientSession):
    async with upstream(vendor, http).relay(post("/v1/hang")) as reply:
        assert await anext(reply.chunks) == b"data: 1\n\n"
    async with asyncio.timeout(20):
        await vendor.left.wait()
    assert not reply.complete


async def test_silence_is_a_timeout(vendor: Vendor, http: aiohttp.ClientSession):
    with pytest.raises(EngineTimeout):
        await read(upstream(vendor, http, idle_s=0.1), post("/v1/hang"))


async def test_a_vendor_that_is_down(vendor: Vendor, http: aiohttp.ClientSession):
    there = upstream(vendor, http)
    await vendor.server.close()
    with pytest.raises(EngineUnavailable, match="can't be reached"):
        await read(there, post("/v1/messages"))
