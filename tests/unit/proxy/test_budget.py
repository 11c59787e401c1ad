"""A session has what the settings give it: then it is told to end, in its protocol, and then it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.proxy.call import budget
from rolltap.proxy.call.budget import FINAL_ANSWERS
from rolltap.settings import LimitSettings
from rolltap.tokenizer import HubTokenizer

from .conftest import Plane, make_plane

HELLO = {"role": "user", "content": "hello"}


async def statuses(plane: Plane, count: int) -> list[int]:
    return [(await plane.client.chat({**HELLO, "content": f"hello {number}"})).status for number in range(count)]


@pytest.mark.parametrize(
    ("limits", "served", "told"),
    [
        ({"session_calls": 2}, 2, "2 calls"),
        ({"session_tokens": 5}, 1, "5 tokens"),
        ({"session_mb": 0.0002}, 2, "0.0002 MB"),
    ],
)
async def test_a_budget_ends_politely(tokenizer: HubTokenizer, limits: Any, served: int, told: str) -> None:
    plane = await make_plane(tokenizer, LimitSettings(**limits))
    assert await statuses(plane, served) == [200] * served
    refusal = await plane.client.chat({**HELLO, "content": "one more"})
    assert refusal.status == 400
    assert refusal.json()["error"]["message"] == (
        f"budget used: this session has {told}"
        + (" of requests" if "mb" in str(limits) else "")
        + "; finish now with the work done so far"
    )
    assert await statuses(plane, FINAL_ANSWERS) == [400] * (FINAL_ANSWERS - 1) + [409]
    assert len(plane.engine.seen) == served


async def test_every_dialect_is_told_in_its_own_shape(tokenizer: HubTokenizer) -> None:
    plane = await make_plane(tokenizer, LimitSettings(session_calls=1))
    assert await statuses(plane, 1) == [200]
    said = {"model": "tiny", "max_tokens": 9, "messages": [HELLO]}
    answer = await plane.client.post("/v1/messages", said)
    assert (answer.status, answer.json()["type"], answer.json()["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )


async def test_who_is_too_fast_waits(tokenizer: HubTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(budget.time, "monotonic", lambda: now)
    plane = await make_plane(tokenizer, LimitSettings(calls_per_minute=3))
    assert await statuses(plane, 4) == [200, 200, 200, 429]
    refused = await plane.client.chat({**HELLO, "content": "again"})
    assert refused.headers["retry-after"] == "20"
    now += 20
    assert await statuses(plane, 2) == [200, 429]


@pytest.mark.parametrize(
    "spoiled", [b"no JSON " * 30, b'{"model": "tiny", "messages": [{"role": "nobody"}]}' + b" " * 200]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
async def test_refused_bodies_count(tokenizer: HubTokenizer, path: str, spoiled: bytes) -> None:
    plane = await make_plane(tokenizer, LimitSettings(session_mb=0.0005))
    assert await statuses(plane, 1) == [200]
    assert [(await plane.client.post(path, spoiled)).status for _ in range(2)] == [400, 400]
    refusal = await plane.client.chat(HELLO)
    assert (refusal.status, "0.0005 MB of requests" in refusal.json()["error"]["message"]) == (400, True)
    assert len(plane.engine.seen) == 1
