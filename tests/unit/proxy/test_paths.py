"""Slashes too many, counts that need no generation, and the context length in the list of models."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.proxy.engines.base import EngineFacts
from rolltap.tampering import TamperingKind

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
MESSAGES = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
CONTENTS = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("//v1/chat/completions", CHAT),
        ("/v1//chat/completions", CHAT),
        ("/v1///chat//completions/", CHAT),
        ("//v1//messages", MESSAGES),
        ("/v1//responses", {"model": "tiny", "input": "hi"}),
        ("//v1beta//models/tiny:generateContent", CONTENTS),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/s/{session}", "//s/{session}", "/s//{session}", "//s//{session}/"])
async def test_repeated_slashes_are_one(plane: Any, prefix: str, path: str, body: Any) -> None:
    answer = await plane.client.post(prefix.format(session=plane.session.id) + path, body)
    assert answer.status == 200, answer.body


async def test_a_stream_is_a_stream_with_a_slash_at_its_end(plane: Any) -> None:
    path = "//v1beta/models/tiny:streamGenerateContent/"
    answer = await plane.client.post(path, CONTENTS, query="alt=sse")
    assert answer.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    "path",
    [
        "/s/other/v1/chat/completions",
        "//s/other/v1/chat/completions",
        "/s//other//v1/chat/completions",
        "//s//other/s/{session}/v1/chat/completions",
    ],
)
async def test_another_session_stays_refused(plane: Any, path: str) -> None:
    answer = await plane.client.post(path.format(session=plane.session.id), CHAT)
    assert answer.status in (401, 403, 404)
    assert not await plane.rows()


@pytest.mark.parametrize(
    "path", ["//sessions", "/s/{session}//sessions", "//leases", "/v1/..//sessions", "//admin//sessions", "/v1//..//s"]
)
async def test_no_other_plane_is_reached(plane: Any, path: str) -> None:
    answer = await plane.client.post(path.format(session=plane.session.id), {})
    assert answer.status == 404


@pytest.mark.parametrize("path", ["//sessions", "/s/{session}//leases", "//s//{session}///rewards"])
async def test_the_attempt_is_counted(plane: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[TamperingKind] = []

    async def note(key: str, kind: TamperingKind, detail: str) -> None:
        acts.append(kind)

    monkeypatch.setattr(plane.client.app, "_note", note)
    await plane.client.post(path.format(session=plane.session.id), {})
    assert acts == [TamperingKind.OTHER_PLANE]


LAST = {"role": "assistant", "content": "ok"}
COUNTS: list[tuple[str, Any, str]] = [
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [*MESSAGES["messages"], LAST]}, "input_tokens"),
    ("//v1/messages//count_tokens/", {"model": "tiny", "messages": [*MESSAGES["messages"], LAST]}, "input_tokens"),
    (
        "/v1beta/models/tiny:countTokens",
        {"contents": [*CONTENTS["contents"], {"role": "model", "parts": [{"text": "ok"}]}]},
        "totalTokens",
    ),
    ("/v1/responses/input_tokens", {"model": "tiny", "input": [*MESSAGES["messages"], LAST]}, "input_tokens"),
    ("/v1/responses/input_tokens", {"model": "tiny", "input": "hi", "instructions": "Be brief."}, "input_tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), COUNTS)
async def test_a_count_needs_no_generation(plane: Any, path: str, body: Any, field: str) -> None:
    answer = await plane.client.post(path, body)
    assert answer.status == 200, answer.body
    assert answer.json()[field] > 1
    assert not plane.engine.seen


async def test_a_count_is_the_prompts(plane: Any) -> None:
    body = {"model": "tiny", "input": "How many?"}
    counted = (await plane.client.post("/v1/responses/input_tokens", body)).json()
    reply = (await plane.client.post("/v1/responses", body)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": reply["usage"]["input_tokens"]}


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/v1beta/models", "/v1beta/models/tiny"])
async def test_models_have_their_context_under_the_vendors_names(plane: Any, path: str) -> None:
    plane.policy.learn(EngineFacts("told", "", ("tiny",), 45_000, True, False, "processed"))
    answer = (await plane.client.post(path, b"", method="GET")).json()
    model = answer if path.endswith("tiny") else answer["data"][0]
    names = ("max_model_len", "context_length", "context_window", "max_input_tokens", "inputTokenLimit")
    assert [model[name] for name in names] == [45_000] * len(names)


async def test_an_unknown_context_is_left_out(plane: Any) -> None:
    model = (await plane.client.post("/v1/models/tiny", b"", method="GET")).json()
    assert model["id"] == "tiny"
    assert "max_model_len" not in model
