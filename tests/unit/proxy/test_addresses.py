"""No reply of the agent plane has an address of the deployment: past the proxy, nothing is on the record."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from rolltap.engine.scripted import say
from rolltap.errors import BY_CODE, RolltapError
from rolltap.network import without_addresses
from rolltap.proxy.planes.agent import _for_agents
from tests.harnesses.house import POLICY, house

ADDRESSES = (
    "http://engine.internal:8000",
    "https://10.1.2.3/v1",
    "postgresql://rolltap:***@db.internal:5432/rolltap",
    "redis://:***@[fd00::12]:6379/0",
    "unix:///run/secret/engine.sock",
    "('10.1.2.3', 8000)",
    "('fd00::12', 8000, 0, 0)",
    "10.1.2.3:8000",
    "[fd00::12]:8000",
    "db.internal:5432",
    "gpu-1:8000",
    "/srv/secret/rolltap.db",
)
PARTS = ("internal", "10.1.2.3", "fd00", "8000", "5432", "6379", "secret", "gpu-1")
SENTENCES = (
    "engine main at {} can't be reached or broke off: [Errno 111] Connect call failed",
    "{}: could not extend file: No space left on device",
    "the store ({}) is away",
    "Cannot connect to host {} ssl:default [Connection refused]",
    'open "{}": permission denied.',
    "it was {}.",
)


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_text_without_addresses_keeps_its_words(address: str, sentence: str) -> None:
    told = without_addresses(sentence.format(address))
    assert not [part for part in PARTS if part in told], told
    assert [word for word in sentence.split() if "{" not in word] == [
        word for word in told.split() if "[address]" not in word
    ]


def test_what_is_no_address_stays() -> None:
    text = "call 01m8nq4g7hzcbwqe2jhz: answered 503: try 3 of 4, in 0.08 s (at 12 o'clock); either/or; ratio 3:1"
    assert without_addresses(text) == text


@pytest.mark.parametrize("kind", [kind for kind in BY_CODE.values() if kind.status >= 500])
def test_every_failure_of_ours_is_told_as_what_it_is(kind: type[RolltapError]) -> None:
    error = kind("engine main at http://engine.internal:8000 is away", retry_after=2.0)
    told = _for_agents(error)
    assert (type(told), told.code, told.status, told.retry_after) == (kind, error.code, error.status, 2.0)
    assert told.message == "engine main at [address] is away"
    assert "engine.internal" in error.message, "the log and the record have it"


async def test_an_engine_that_has_gone_leaves_no_address_in_the_reply(tmp_path: Path) -> None:
    async with house(say("Hello."), tmp_path) as home, aiohttp.ClientSession() as http:
        opened = await home.open()
        await home.engine.__aexit__(None, None, None)
        for path, body in (
            ("/v1/chat/completions", {"model": POLICY, "messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/messages", {"model": POLICY, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/responses", {"model": POLICY, "input": "hi"}),
            (f"/v1beta/models/{POLICY}:generateContent", {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}),
        ):
            headers = {"authorization": f"Bearer {opened.endpoint.key}"}
            async with http.post(home.urls["agent"] + path, json=body, headers=headers) as reply:
                text = await reply.text()
            assert reply.status == 503, text
            assert "can't be reached" in text
            assert home.engine.url.rpartition(":")[2] not in text
        calls = (await home.client.get(f"/read/sessions/{opened.session_id}"))["calls"]
        assert home.engine.url in str(calls)
