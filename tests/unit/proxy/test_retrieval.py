"""A recorded Responses reply is read again as it was delivered, by its own session only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolltap.calllog.sql import open_call_log
from rolltap.ids import new_id
from rolltap.protocols.base import WireRequest
from rolltap.protocols.handles import Handles
from rolltap.proxy.call.policies import Policies
from rolltap.proxy.continuation.call_node import CallNode, Lineage
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.sessions.live_sessions import LiveSession, SessionCache, key_hash
from rolltap.proxy.sessions.response_store import ResponseStore
from rolltap.types import Session
from tests.dialects import DIALECTS

from .conftest import SECRET, serve

ASK = {
    "model": "tiny",
    "input": "hi",
    "tools": [{"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}],
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "temperature": 0.5,
    "metadata": {"task": "7"},
}
SAID = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'


async def read(plane: Any, reply: str, **options: Any) -> Any:
    return await plane.client.post(f"/v1/responses/{reply}", b"", method="GET", **options)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_is_read_as_it_was_delivered(plane: Any, stream: bool) -> None:
    plane.engine.replies = [SAID]
    answer = await plane.client.post("/v1/responses", {**ASK, "stream": stream})
    last = answer.body.strip().rsplit(b"data: ", 1)[-1]
    delivered = json.loads(last)["response"] if stream else answer.json()
    assert [item["type"] for item in delivered["output"]] == ["message", "function_call"]
    again = await read(plane, delivered["id"])
    assert (again.status, again.json()) == (200, delivered)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_reply_is_continued_by_its_item(plane: Any, stream: bool) -> None:
    plane.engine.replies = ["<|im_end|>"]
    answer = await plane.client.post("/v1/responses", {**ASK, "stream": stream})
    last = answer.body.strip().rsplit(b"data: ", 1)[-1]
    output = (json.loads(last)["response"] if stream else answer.json())["output"]
    question = {"role": "user", "content": "hi"}
    await plane.client.post("/v1/responses", {**ASK, "input": [question, *output, question]})
    first, second = await plane.rows()
    assert (second.intent.parent_id, second.intent.break_) == (first.intent.id, None)


async def test_only_the_own_session_reads_a_reply(plane: Any) -> None:
    now = time.time()
    await plane.log.open_session(Session(new_id(), "tiny", key_hash("other"), now, now + 60))
    made = (await plane.client.post("/v1/responses", ASK)).json()
    assert (await read(plane, made["id"], key="other")).status == 404
    assert (await read(plane, made["id"], key="unknown")).status == 401
    assert (await read(plane, "resp_unknown")).status == 404
    assert (await read(plane, made["id"], key="project-key")).status == 404


async def test_under_the_projects_key_a_reply_is_read_and_continued_in_its_session(plane: Any) -> None:
    made = (await plane.client.post("/v1/responses", ASK, key="project-key")).json()
    assert (await read(plane, made["id"], key="project-key")).json() == made
    assert (await read(plane, made["id"])).status == 404
    assert (await read(plane, "resp_unknown", key="project-key")).status == 404
    more = {**ASK, "input": "and?", "previous_response_id": made["id"]}
    continued = (await plane.client.post("/v1/responses", more, key="project-key")).json()
    item = {
        **ASK,
        "input": [{"type": "item_reference", "id": continued["output"][0]["id"]}, {"role": "user", "content": "so?"}],
    }
    assert (await plane.client.post("/v1/responses", item, key="project-key")).status == 200
    (captured,) = [session for session in await plane.log.sessions() if session.id != plane.session.id]
    first, second, _ = await plane.rows(captured.id)
    assert second.intent.parent_id == first.intent.id
    lost = {**more, "previous_response_id": "resp_unknown"}
    refused = await plane.client.post("/v1/responses", lost, key="project-key")
    assert (refused.status, refused.json()["error"]["param"]) == (400, "previous_response_id")


async def test_a_captured_session_that_was_closed_is_not_continued(plane: Any) -> None:
    made = (await plane.client.post("/v1/responses", ASK, key="project-key")).json()
    (captured,) = [session for session in await plane.log.sessions() if session.id != plane.session.id]
    await plane.log.close_session(captured.id, time.time())
    assert (await read(plane, made["id"], key="project-key")).status == 404


async def test_what_was_not_to_be_stored_is_not_found(plane: Any) -> None:
    made = (await plane.client.post("/v1/responses", {**ASK, "store": False})).json()
    answer = await read(plane, made["id"])
    assert answer.status == 404
    assert "store" in answer.json()["error"]["message"]


async def test_a_reply_of_another_dialect_is_not_found(plane: Any) -> None:
    made = (await plane.client.chat({"role": "user", "content": "hi"})).json()
    assert (await read(plane, f"resp_{made['id'].removeprefix('chatcmpl-')}")).status == 404


@pytest.mark.parametrize("is_loaded", [False, True])
async def test_a_reply_of_another_dialect_is_not_continued(plane: Any, is_loaded: bool) -> None:
    plane.engine.replies = [SAID]
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    made = (await plane.client.chat({"role": "user", "content": "hi"}, tools=tools)).json()
    handle = made["choices"][0]["message"]["tool_calls"][0]["id"]
    client = serve(plane.log, plane.engine, plane.session, plane.limits).client if is_loaded else plane.client
    named = {**ASK, "previous_response_id": f"resp_{handle}"}
    item = {**ASK, "input": [{"type": "item_reference", "id": f"msg_{handle}"}, {"role": "user", "content": "so?"}]}
    for body, param in ((named, "previous_response_id"), (item, "input")):
        refused = await client.post("/v1/responses", body)
        assert (refused.status, refused.json()["error"]["param"]) == (400, param)
        assert "is on record in this session" in refused.json()["error"]["message"]


async def test_a_reading_that_asks_for_more_is_refused_by_name(plane: Any) -> None:
    made = (await plane.client.post("/v1/responses", ASK)).json()
    answer = await read(plane, made["id"], query="stream=true")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "stream")


async def test_a_reply_that_another_replica_recorded_is_continued(plane: Any) -> None:
    made = (await plane.client.post("/v1/responses", ASK)).json()
    elsewhere = LiveSession(plane.session, Forest(DigestCache()))
    dialect, recalls = (
        DIALECTS["openai_responses"],
        ResponseStore(plane.log, SessionCache(plane.log), Handles(SECRET), Policies({}), 1.0),
    )
    body = json.dumps({"model": "tiny", "input": "and?", "previous_response_id": made["id"]}).encode()
    whole = await recalls.fill(dialect, elsewhere, dialect.parse(WireRequest("", {}, {}, {}, body)))
    assert [message.role for message in whole.messages] == ["user", "assistant", "user"]


async def test_a_reply_is_read_while_another_call_of_its_session_is_not_on_record_yet(
    plane: Any, tmp_path: Path
) -> None:
    made = (await plane.client.post("/v1/responses", ASK)).json()
    (row,) = await plane.rows(plane.session.id)
    log = open_call_log(f"sqlite:///{tmp_path}/log.db")
    await log.start()
    await log.open_session(plane.session)
    await log.append_intent(row.intent)
    await log.append_completion(row.completion)
    live = LiveSession(plane.session, Forest(DigestCache()))
    live.forest.load([row])
    live.forest.add(CallNode(new_id(), None, Lineage(0, b"", b"", b""), np.empty(0, np.int32)))
    dialect, recalls = (
        DIALECTS["openai_responses"],
        ResponseStore(log, SessionCache(log), Handles(SECRET), Policies({"tiny": plane.policy}), 1.0),
    )
    request, started, ended = await recalls.reply(dialect, live, made["id"])
    assert json.loads(dialect.reply(request, started, ended))["output"] == made["output"]
    await log.close()


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")])
async def test_the_record_can_only_be_read(plane: Any, method: str, path: str) -> None:
    answer = await plane.client.post(f"/v1/responses/resp_1{path}", b"", method=method)
    assert answer.status == 405
    assert "GET /v1/responses/{id}" in answer.json()["error"]["message"]
