"""Vendors and engines with TLS are reached by the proxy that the environment names; others directly."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rolltap.errors import ConfigError
from rolltap.network import proxy_of
from rolltap.proxy.engines.connections import ConnectionBroken, Connections
from rolltap.proxy.engines.passthrough import NativeRequest, PassthroughUpstream
from rolltap.settings import EngineSettings

from ...faults.relay import Relay
from ..proxy.test_tls import certificate

VARIABLES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "all_proxy", "no_proxy", "NO_PROXY")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "environment", "proxy"),
    [
        ("https://vendor.example/v1", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://vendor.example/v1", {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("https://vendor.example/v1", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "other,.example"}, None),
        ("https://vendor.example:8443", {"HTTPS_PROXY": "http://proxy:3128", "no_proxy": "vendor.example:8443"}, None),
        ("https://vendor.example/v1", {"http_proxy": "http://proxy:3128", "all_proxy": "socks5://proxy"}, None),
        ("http://gpu-1:8000", {"HTTPS_PROXY": "http://proxy:3128", "http_proxy": "http://proxy:3128"}, None),
        ("https://vendor.example/v1", {}, None),
    ],
)
def test_only_https_goes_by_a_proxy(
    url: str, environment: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


def test_another_kind_of_proxy_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy:1080")
    with pytest.raises(ConfigError, match=r"vendor\.example is reached by an http:// proxy only, or named in NO_PROXY"):
        proxy_of("https://vendor.example/v1")


@asynccontextmanager
async def vendor_behind_a_proxy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, status: str = "200 Connection established"
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """The URL of a server with TLS, and the heads of the requests that a proxy gets."""
    pem, key = certificate(folder / "own")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, key)
    monkeypatch.setenv("SSL_CERT_FILE", pem)

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path, "got": await request.text()})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    heads: list[bytes] = []
    relays: list[Relay] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())
        if status.startswith("200"):
            relays.append(Relay("127.0.0.1", server.port or 0))
            await relays[-1].accept(reader, writer)
        else:
            writer.close()

    server = TestServer(app, scheme="https", host="127.0.0.1")
    await server.start_server(ssl=context)
    listening = await asyncio.start_server(proxy, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:secret@127.0.0.1:{port}")
    try:
        yield f"https://localhost:{server.port}", heads
    finally:
        listening.close()
        for relay in relays:
            await relay.end()
        await server.close()


async def test_an_engine_with_tls_is_reached_by_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with vendor_behind_a_proxy(tmp_path, monkeypatch) as (url, heads):
        connections = Connections(url, {})
        for number in range(3):
            reply = await connections.request("POST", "/v1/x", str(number).encode(), {})
            body = await reply.read()
            reply.release()
            assert (reply.status, body) == (200, b'{"path": "/v1/x", "got": "%d"}' % number)
        connections.close()
    (head,) = heads
    assert head.startswith(f"CONNECT {url.removeprefix('https://')} HTTP/1.1".encode())
    assert b"proxy-authorization: Basic " + b64encode(b"me:secret") in head


async def test_a_proxy_that_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with vendor_behind_a_proxy(tmp_path, monkeypatch, "407 Proxy Authentication Required") as (url, _):
        with pytest.raises(ConnectionBroken, match=r"the proxy 127.0.0.1:\d+ \(HTTPS_PROXY\) answered 407"):
            await Connections(url, {}).request("GET", "/", b"", {})


async def test_a_vendor_is_reached_by_the_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with vendor_behind_a_proxy(tmp_path, monkeypatch) as (url, heads):
        trusting = aiohttp.TCPConnector(ssl=ssl.create_default_context())
        settings = EngineSettings.model_validate({"kind": "passthrough", "url": url})
        async with aiohttp.ClientSession(connector=trusting) as http:
            upstream = PassthroughUpstream("vendor", settings, http, ["openai_chat"])
            async with upstream.relay(NativeRequest("POST", "/v1/x", headers={}, body=b"1")) as reply:
                body = b"".join([chunk async for chunk in reply.chunks])
    assert body == b'{"path": "/v1/x", "got": "1"}'
    assert len(heads) == 1
