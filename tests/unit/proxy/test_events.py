"""What an operator reads while the proxy serves: the first call of a session, refusals, engines in trouble."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineUnavailable
from rolltap.proxy.app import Rolltap
from rolltap.settings import Settings

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


async def test_a_model_that_the_engine_lacks_is_said_at_the_start(
    tmp_path: Path, events: pytest.LogCaptureFixture
) -> None:
    async with ScriptedEngine(say("Hello."), FOLDER) as engine:
        for model, warnings in (("scripted", 0), ("no-such-model", 1)):
            policy = {"engine": "main", "model": model, "tokenizer": str(FOLDER), "family": "qwen3"}
            engines = {"main": {"url": engine.url}}
            values = {"data": tmp_path / model, "engines": engines, "policies": {"mine": policy}}
            async with Rolltap.running(Settings.model_validate(values)):
                pass
            lacking = [record for record in events.records if "serves no model" in record.getMessage()]
            assert len(lacking) == warnings
    assert lacking[0].levelno == logging.WARNING
    assert "policy mine: engine main serves no model 'no-such-model'" in lacking[0].getMessage()
    assert "one of scripted" in lacking[0].getMessage()


async def test_a_server_without_policies_is_warned_about(tmp_path: Path, events: pytest.LogCaptureFixture) -> None:
    values = {"data": tmp_path, "engines": {"main": {"url": "http://127.0.0.1:9"}}}
    async with Rolltap.running(Settings.model_validate(values)):
        pass
    (record,) = [record for record in events.records if "no policy" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert "[policies.NAME]" in record.getMessage()
    assert "main" in record.getMessage()
