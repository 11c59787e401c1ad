"""Answers that no rolltap server wrote (a load balancer's, an ingress's, a mesh's): a server that can't be reached."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from rolltap.contract.operations import Request
from rolltap.errors import NotFound, ServerUnreachable
from rolltap.http_client import AsyncHttpClient, HttpClient, error_of

HTML = b"<html><head><title>502 Bad Gateway</title></head><body><hr><center>nginx/1.22.1</center></body></html>"
OWN = b'{"error": {"code": "not_found", "message": "no such thing"}}'

ANSWERS = [(status, HTML, "text/html") for status in (404, 413, 429, 500, 502, 503, 504, 521)] + [
    (503, b"no healthy upstream", "text/plain"),  # Envoy
    (502, b"", ""),
    (504, b'{"message": "Endpoint request timed out"}', "application/json"),  # API gateways
    (502, b'{"error": "no"}', "application/json"),
    (503, b"[]", "application/json"),
    (404, b"default backend - 404", "text/plain"),  # Kubernetes' ingress
]


@dataclass
class Balancer:
    """Gives each of `answers` once, then rolltap's own reply."""

    url: str
    answers: list[tuple[int, bytes, str]] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    tries: list[str] = field(default_factory=list)


@pytest.fixture
def balancer() -> Iterator[Balancer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.tries.append(self.headers["x-rolltap-try"])
            state.requests.append(self.rfile.read(int(self.headers["content-length"])))
            own = (200, b'{"acknowledged": 1}', "application/json")
            status, body, kind = state.answers.pop(0) if state.answers else own
            self.send_response(status)
            if kind:
                self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    state = Balancer(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def send(url: str, *, patience: float = 5.0, once: bool = False) -> object:
    return HttpClient(url, "key", patience=patience).send(Request("POST", "/ack", {"step": 3}, once=once))


def send_asynchronously(url: str, *, patience: float = 5.0, once: bool = False) -> object:
    async def run() -> object:
        async with AsyncHttpClient(url, "key", patience=patience) as client:
            return await client.send(Request("POST", "/ack", {"step": 3}, once=once))

    return asyncio.run(run())


@pytest.fixture(params=[send, send_asynchronously])
def sending(request: pytest.FixtureRequest) -> Callable[..., object]:
    return request.param


def test_each_try_says_which_one_it_is(balancer: Balancer, sending: Callable[..., object]) -> None:
    balancer.answers = [ANSWERS[0]] * 2
    for _ in range(2):
        sending(balancer.url)
    requests = [one.partition("/")[0] for one in balancer.tries]
    assert [one.partition("/")[2] for one in balancer.tries] == ["0", "1", "2", "0"]
    assert requests == [requests[0]] * 3 + [requests[3]]
    assert requests[0] != requests[3]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer[0]} {answer[1][:20].decode()}")
def test_a_balancers_answer_is_tried_again(
    balancer: Balancer, answer: tuple[int, bytes, str], sending: Callable[..., object]
) -> None:
    balancer.answers = [answer]
    assert sending(balancer.url) == {"acknowledged": 1}
    assert balancer.requests == [b'{"step":3}'] * 2


@pytest.mark.parametrize("code", ["engine_timeout", "engine_unavailable", "store_unavailable"])
def test_a_server_whose_engine_or_store_does_not_answer_is_asked_again(
    balancer: Balancer, code: str, sending: Callable[..., object]
) -> None:
    body = f'{{"error": {{"code": "{code}", "message": "not now"}}}}'.encode()
    balancer.answers = [(504, body, "application/json")]
    assert sending(balancer.url) == {"acknowledged": 1}


def test_a_balancer_that_stays_alone_is_said_without_its_page(
    balancer: Balancer, sending: Callable[..., object]
) -> None:
    balancer.answers = [(502, HTML, "text/html")] * 2
    with pytest.raises(ServerUnreachable) as caught:
        sending(balancer.url, patience=0)
    assert "502" in caught.value.message
    assert balancer.url in caught.value.message
    assert "<" not in caught.value.message
    assert "nginx" not in caught.value.message


def test_what_must_not_be_repeated_is_sent_once(balancer: Balancer, sending: Callable[..., object]) -> None:
    balancer.answers = [(502, HTML, "text/html")]
    with pytest.raises(ServerUnreachable):
        sending(balancer.url, once=True)
    assert len(balancer.requests) == 1


@pytest.mark.parametrize("status", [404, 502, 503])
def test_rolltaps_own_error_keeps_its_kind_whatever_the_status(status: int) -> None:
    assert type(error_of(status, OWN)) is NotFound
