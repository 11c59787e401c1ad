"""A session's page follows it: it asks for what came since, and gets that alone, until the session is over."""

from __future__ import annotations

import re
import time
from html import unescape

import pytest

from rolltap.proxy.viewer.session import goes_on
from rolltap.reading.types import SessionSummary

from ..reading.conftest import QUESTION, SYSTEM
from .conftest import Viewed


@pytest.fixture
def viewed(viewed_by_all: Viewed) -> Viewed:
    return viewed_by_all


def news_of(page: str) -> str:
    """The address at which the page asks for news."""
    found = re.search(r'data-news="/view([^"]+)"', page)
    assert found is not None, "the page does not follow its session"
    return unescape(found[1])


def calls_in(page: str) -> list[str]:
    return re.findall(r'<article [^>]*id="call-(\d+)"', page)


async def test_a_page_is_told_of_new_calls_alone_and_of_the_end(viewed: Viewed):
    talk = await viewed.reading.talk()
    page = await viewed.get(f"/sessions/{talk.session_id}")
    assert calls_in(page) == []
    assert await viewed.get(f"{news_of(page)}&from=0") == "", "nothing happened"
    reply = await talk.ask(SYSTEM, QUESTION)
    page = await viewed.get(f"{news_of(page)}&from=0")
    assert calls_in(page) == ["1"]
    tool = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "stripes.txt"}
    await talk.ask(SYSTEM, QUESTION, reply, tool)
    page = await viewed.get(f"{news_of(page)}&from=1")
    assert calls_in(page) == ["2"], "the first one is on the page already"
    assert re.findall(r'data-call="(\d+)"', page) == ["1", "2"], "the outline is whole"
    assert QUESTION["content"] not in page
    assert await viewed.get(f"{news_of(page)}&from=2") == ""
    await viewed.reading.home.client.close_session(talk.session_id)
    page = await viewed.get(f"{news_of(page)}&from=2")
    assert calls_in(page) == []
    assert "data-news" not in page
    assert "data-news" not in await viewed.get(f"/sessions/{talk.session_id}")


@pytest.mark.parametrize(
    ("values", "more"),
    [
        ({}, True),
        ({"closed_at": 1.0}, False),
        ({"closed_at": 1.0, "open_calls": 1}, True),
        ({"closed_at": 1.0, "status": "running"}, True),
        ({"closed_at": 1.0, "status": "succeeded"}, False),
        ({"expires_at": 1.0}, False),
    ],
)
def test_a_session_goes_on_while_more_can_come(values: dict, more: bool):
    fields = {"id": "s", "policy": "tiny", "created_at": 0.0, "expires_at": time.time() + 3600}
    assert goes_on(SessionSummary(**{**fields, **values})) is more


async def test_a_page_that_was_opened_at_an_unknown_call_shows_the_last(viewed: Viewed):
    talk = await viewed.reading.talk()
    await talk.two_turns()
    assert calls_in(await viewed.get(f"/sessions/{talk.session_id}?from=99")) == ["2"]
