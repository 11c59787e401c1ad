"""A schema that the engine does not take is the client's fault: one try, and a 400 that names the field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltap.engine.scripted import Fault, ScriptedEngine, ScriptedReply, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineRefused, InvalidRequest, SchemaRefused
from rolltap.protocols.conversation import ChatRequest, Message, Sampling, Text, Tool, ToolChoice
from rolltap.proxy.app import Rolltap
from rolltap.proxy.call.sources.base import upstream_faults
from rolltap.proxy.server import bind, serve
from rolltap.settings import PinSettings, Settings

BAD = {"type": "not-a-type"}
HI = {"role": "user", "content": "hi"}
CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]
CALLS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [HI], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}},
        "response_format",
    ),
    "chat object": (
        "/v1/chat/completions",
        {"messages": [HI], "response_format": {"type": "json_object"}, "stream": True},
        "response_format",
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
        "text.format",
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [HI], "output_config": {"format": {"type": "json_schema", "schema": BAD}}},
        "output_config.format",
    ),
    "messages, older": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [HI], "output_format": {"type": "json_schema", "schema": BAD}},
        "output_format",
    ),
    "gemini": (
        "/v1beta/models/default:generateContent",
        {"contents": CONTENTS, "generationConfig": {"responseSchema": BAD}},
        "generationConfig.responseSchema",
    ),
    "gemini, JSON": (
        "/v1beta/models/default:generateContent",
        {"contents": CONTENTS, "generationConfig": {"responseJsonSchema": BAD}},
        "generationConfig.responseJsonSchema",
    ),
}


@asynccontextmanager
async def proxy(folder: Path, engine: ScriptedEngine, kind: str) -> AsyncIterator[httpx.AsyncClient]:
    model: dict[str, Any] = {"engine": "main", "model": "scripted"}
    if kind == "vllm":
        model |= {"tokenizer": str(FOLDER), "family": "qwen3", "max_context": 4096}
    settings = Settings.model_validate(
        {"data": folder, "engines": {"main": {"kind": kind, "url": engine.url}}, "policies": {"default": model}}
    )
    async with Rolltap.running(settings) as app:
        socket, stop = bind("127.0.0.1", 0), asyncio.Event()
        serving = asyncio.create_task(serve({"agent": (app.planes["agent"], socket)}, stop))
        url = f"http://127.0.0.1:{socket.getsockname()[1]}"
        key = app.settings.keys.project
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                yield client
        finally:
            stop.set()
            await serving


@pytest.mark.parametrize("kind", ["vllm", "openai_compatible"])
@pytest.mark.parametrize("status", [400, 422, 500])
async def test_a_bad_schema_is_named_and_asked_once(tmp_path: Path, kind: str, status: int) -> None:
    fault = Fault(kind="status", status=status, times=0)
    async with (
        ScriptedEngine(say(ScriptedReply(say="{}", fault=fault)), FOLDER) as engine,
        proxy(tmp_path, engine, kind) as client,
    ):
        for name, (path, body, field) in CALLS.items():
            before = len(engine.journal.entries)
            answer = await client.post(path, json={"model": "default", **body})
            asked = len(engine.journal.entries) - before
            assert (name, answer.status_code, asked) == (name, 400, 1), answer.text
            assert field in answer.text


@pytest.mark.parametrize("kind", ["vllm", "openai_compatible"])
async def test_without_a_schema_a_failing_engine_is_tried_again(tmp_path: Path, kind: str) -> None:
    fault = Fault(kind="status", status=500, retry_after=0, times=2)
    async with (
        ScriptedEngine(say(ScriptedReply(say="ok", fault=fault)), FOLDER) as engine,
        proxy(tmp_path, engine, kind) as client,
    ):
        path, body, _ = CALLS["chat"]
        before = len(engine.journal.entries)
        answer = await client.post(path, json={"model": "default", "messages": body["messages"]})
        assert (answer.status_code, len(engine.journal.entries) - before) == (200, 3)


REQUEST = ChatRequest(
    "anthropic",
    "m",
    (Message("user", (Text("hi"),)),),
    tools=(Tool("look"),),
    tool_choice=ToolChoice("required"),
    sampling=Sampling(temperature=2, max_tokens=10**9, stop=("(",), json_schema={}),
)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("max_tokens is too large: 1000000000", "max_tokens"),
        ("`max_completion_tokens` must be at most 8192", "max_tokens"),
        ("Invalid 'stop': regex does not compile", "stop_sequences"),
        ("temperature must be in [0, 1]", "temperature"),
        ("tools[0].function.parameters: invalid", "tools"),
    ],
)
def test_a_field_that_the_upstream_names_is_the_clients(message: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as raised, upstream_faults(REQUEST, PinSettings()):
        raise EngineRefused(message, http_status=400)
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("error", "pins"),
    [
        (EngineRefused("no such deployment", http_status=400), PinSettings()),
        (EngineRefused("top_p must be below 1", http_status=400), PinSettings()),  # the client sent none
        (EngineRefused("temperature must be in [0, 1]", http_status=400), PinSettings(temperature=3)),
        (EngineRefused("temperature is not allowed for this key", http_status=403), PinSettings()),
    ],
)
def test_other_refusals_are_the_deployments(error: EngineRefused, pins: PinSettings) -> None:
    with pytest.raises(EngineRefused) as raised, upstream_faults(REQUEST, pins):
        raise error
    assert raised.value is error


def test_a_refused_schema_is_the_schemas_unless_a_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as raised, upstream_faults(REQUEST, PinSettings()):
        raise SchemaRefused("Grammar error", http_status=400)
    assert raised.value.param == "output_config.format"
