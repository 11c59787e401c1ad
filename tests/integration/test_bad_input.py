"""Whatever comes over HTTP, the answer is a reply or the dialect's own 4xx, on record, and the process serves on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from rolltap.engine.scripted import say
from rolltap.harnesses.client import OpenedSession

from ..harnesses.house import POLICY, House, house
from .bad_input import FORMS, Form, in_shape, large, mistakes
from .mutator import mutants, without_images

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOLDEN = Path(__file__).parents[1] / "golden" / "dialects"
AT_ONCE = 0.1
"""Seconds in which a refusal is to come."""
NOISE = 5
"""How much longer a busy machine may take."""
TRIES = 3
LARGE = 50_000_000
MUTANTS = 150
AT_A_TIME = 8


@dataclass
class Answer:
    status: int
    body: bytes
    seconds: float


class Client:
    """Sends a session's requests as bytes."""

    def __init__(self, home: House, http: aiohttp.ClientSession, session: OpenedSession) -> None:
        self.home = home
        self.http = http
        self.session = session

    async def post(self, form: Form, body: bytes, model: str = POLICY) -> Answer:
        headers = {"authorization": f"Bearer {self.session.endpoint.key}", "content-type": "application/json"}
        begun = time.perf_counter()
        async with self.http.post(
            self.home.app.base_url + form.url(model), data=BytesIO(body), headers=headers
        ) as response:
            return Answer(response.status, await response.read(), time.perf_counter() - begun)

    async def refused(self, form: Form, body: bytes, model: str = POLICY) -> tuple[int, float]:
        """The status of the refusal, which is in the dialect's shape and on record; and the least seconds of a few."""
        before = len(await self.errors())
        answers = [await self.post(form, body, model) for _ in range(TRIES)]
        for answer in answers:
            assert in_shape(form.name, answer.status, answer.body), answer
        message = json.loads(answers[0].body)["error"]["message"]
        recorded = (await self.errors())[before:]
        assert len(recorded) == TRIES
        assert all(error.endswith(f": {message}") for error in recorded), (recorded, message)
        return answers[0].status, min(answer.seconds for answer in answers)

    async def errors(self) -> list[str]:
        """What the record says of the session's refused calls."""
        shown = await self.home.client.get(f"/read/sessions/{self.session.session_id}")
        return [call["error"] for call in shown["calls"] if call["outcome"] == "refused"]

    async def still_served(self, form: Form) -> bool:
        return (await self.post(form, json.dumps(form.body(form.user)).encode())).status == 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A session of a proxy whose limit for bodies is above `LARGE`."""
    async with (
        house(
            say("Hello."),
            tmp_path_factory.mktemp("house"),
            limits={"body_mb": 60},
            aliases=("gardener",),
            max_context=32_768,
        ) as home,
        aiohttp.ClientSession() as http,
    ):
        yield Client(home, http, await home.open())


every_dialect = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@every_dialect
async def test_mistakes_are_refused_at_once(client: Client, form: Form, capsys: pytest.CaptureFixture[str]) -> None:
    took = {}
    for name, body in mistakes(form).items():
        status, took[name] = await client.refused(form, body)
        assert status == 400, name
    unknown = json.dumps(form.body(form.user, model="wizard")).encode()
    status, took["unknown model"] = await client.refused(form, unknown, "wizard")
    assert status == 404
    with capsys.disabled():
        slowest = max(took, key=lambda name: took[name])
        print(f"\n{form.name}: {len(took)} mistakes, the slowest refusal {took[slowest] * 1000:.1f} ms ({slowest})")
    assert max(took.values()) < AT_ONCE * NOISE
    assert await client.still_served(form)


@every_dialect
async def test_a_prompt_of_50_mb_does_not_fit(client: Client, form: Form, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so in the words of a context overflow, without being encoded whole."""
    answer = await client.post(form, large(form, LARGE, "three radishes, "))
    assert answer.status == 400
    assert in_shape(form.name, 400, answer.body)
    assert b"32768" in answer.body
    assert (await client.errors())[-1].startswith("context_length_exceeded: ")
    with capsys.disabled():
        print(f"\n{form.name}: a prompt of 50 MB was refused in {answer.seconds * 1000:.0f} ms, the transfer included")
    assert await client.still_served(form)


@every_dialect
async def test_a_body_over_the_limit_is_refused_before_it_comes(
    client: Client, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    body = large(form, 61_000_000)
    status, took = await client.refused(form, body)
    assert status == 413
    with capsys.disabled():
        print(f"\n{form.name}: a body over the limit was refused in {took * 1000:.1f} ms")
    assert took < AT_ONCE * NOISE
    assert await client.still_served(form)


@every_dialect
async def test_mutated_requests_are_answered_or_refused(client: Client, form: Form) -> None:
    """The golden conversation of the dialect, with and without its image, mutated by a seeded mutator."""
    golden = json.loads((GOLDEN / f"conversation.{form.name}.json").read_text())
    text = without_images(golden)
    bodies = [*mutants(golden, 1, MUTANTS // 3), *mutants(text, 2, 2 * MUTANTS // 3)]
    client = Client(client.home, client.http, await client.home.open())
    turns = asyncio.Semaphore(AT_A_TIME)

    async def answered(body: dict[str, Any]) -> int:
        async with turns:
            answer = await client.post(form, json.dumps(body).encode())
        told = (body, answer.status, answer.body[:500])
        assert answer.status == 200 or 400 <= answer.status < 500, told
        assert answer.status == 200 or in_shape(form.name, answer.status, answer.body), told
        return answer.status

    assert await answered(text) == 200
    statuses = await asyncio.gather(*map(answered, bodies))
    assert {200, 400} <= set(statuses)
    assert len(await client.errors()) == len(statuses) - statuses.count(200)


async def said(client: Client, plane: str, row: str, role: str = "admin", **sent: Any) -> str:
    """What a plane says of a request that it refuses."""
    method, path = row.split()
    headers = {"authorization": f"Bearer {getattr(client.home.app.settings.keys, role)}", **sent.pop("headers", {})}
    async with client.http.request(method, client.home.urls[plane] + path, headers=headers, **sent) as answer:
        assert 400 <= answer.status < 500
        return (await answer.json())["error"]["message"]


async def test_a_body_without_its_content_type_is_told_what_is_missing(client: Client) -> None:
    body = json.dumps({"policies": [POLICY], "trainer": "t"}).encode()
    untyped = {"content-type": "text/plain"}
    assert await said(client, "trainer", "POST /leases", data=body, headers=untyped) == (
        "the body must be a JSON object, sent with Content-Type: application/json"
    )
    assert (await said(client, "trainer", "POST /leases", json={"groups": "two"})).partition(":")[0]


async def test_the_wrong_planes_url_is_told_the_right_one(client: Client) -> None:
    wrong = await said(client, "trainer", "POST /sessions", json={})
    assert wrong == "no route POST /sessions on the trainer plane; it is on the admin plane"
    wrong = await said(client, "admin", "POST /leases/abc/ack", json={})
    assert wrong == "no route POST /leases/abc/ack on the admin plane; it is on the trainer plane"
    assert (await said(client, "admin", "POST /v1/messages", json={})).endswith("; it is on the agent plane")
    assert await said(client, "admin", "GET /nowhere") == "no route GET /nowhere on the admin plane"
    assert "the trainer plane needs a key of role" in await said(client, "trainer", "POST /leases", "runner", json={})
    assert "GET /policies/{name} on the trainer plane needs" in await said(
        client, "trainer", f"GET /policies/{POLICY}", "runner"
    )


async def test_a_base_url_without_v1_or_with_two_is_told_so(client: Client) -> None:
    for prefix in ("", "/s/abc"):
        lacking = await said(client, "agent", f"POST {prefix}/chat/completions", json={})
        assert lacking.endswith("no route POST /chat/completions on the agent plane; the base URL ends in /v1")
        twice = await said(client, "agent", f"POST {prefix}/v1/v1/messages", json={})
        assert twice.endswith("no route POST /v1/v1/messages on the agent plane; /v1 is there twice")
    assert (await said(client, "agent", "GET /nowhere")).endswith("no route GET /nowhere on the agent plane")
