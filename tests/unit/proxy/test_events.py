"""What an operator reads while the proxy serves: the first call of a session, refusals, engines in trouble."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rolltap.errors import EngineUnavailable

USER = {"role": "user", "content": "hi"}


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "rolltap")
    return caplog


async def test_a_sessions_first_call_is_told_once(plane: Any, events: pytest.LogCaptureFixture) -> None:
    plane.engine.replies = ["hello<|im_end|>", "again<|im_end|>"]
    await plane.client.chat(USER)
    await plane.client.chat(USER, {"role": "assistant", "content": "hello"}, USER)
    told = [record.getMessage() for record in events.records if "first call" in record.getMessage()]
    assert told == [f"session {plane.session.id}: first call, openai_chat to policy tiny"]


async def test_a_refusal_says_why(plane: Any, events: pytest.LogCaptureFixture) -> None:
    await plane.client.post("/v1/chat/completions", {"model": "tiny", "messages": [USER], "nonsense": 1})
    (record,) = [record for record in events.records if "refused" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert "nonsense" in record.getMessage()


async def test_an_engine_in_trouble_is_a_warning(plane: Any, events: pytest.LogCaptureFixture) -> None:
    plane.engine.failure = EngineUnavailable("engine main can't be reached")
    await plane.client.chat(USER)
    (record,) = [record for record in events.records if record.levelno == logging.WARNING]
    assert "engine main can't be reached" in record.getMessage()
    assert "policy tiny" in record.getMessage()
