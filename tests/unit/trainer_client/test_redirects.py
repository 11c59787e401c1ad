"""A key goes to the server that the caller names, and nowhere else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rolltap.contract.operations import Request
from rolltap.errors import RolltapError
from rolltap.http_client import AsyncHttpClient, HttpClient


@pytest.fixture
def redirecting() -> Iterator[tuple[str, list[str]]]:
    """A server whose `/here` redirects to `/there`, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302 if self.path == "/here" else 200)
            self.send_header("location", "/there")
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url: str) -> object:
    return HttpClient(url, "key").send(Request("GET", "/here"))


def ask_asynchronously(url: str) -> object:
    async def send() -> object:
        async with AsyncHttpClient(url, "key") as client:
            return await client.send(Request("GET", "/here"))

    return asyncio.run(send())


@pytest.mark.parametrize("asking", [ask, ask_asynchronously])
def test_a_redirect_is_an_error_and_not_followed(
    redirecting: tuple[str, list[str]], asking: Callable[[str], object]
) -> None:
    url, asked = redirecting
    with pytest.raises(RolltapError, match=r"answered 302 \(Found\), as no rolltap server does"):
        asking(url)
    assert asked == ["/here"]
