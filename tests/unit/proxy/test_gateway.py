"""The path of a call, seen from the client and from the record."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolltap.errors import RateLimited, StoreUnavailable
from rolltap.ids import new_id
from rolltap.proxy.call.http_exchange import BrokenReply
from rolltap.proxy.engines.base import SampleChunk, SampleRequest, Take
from rolltap.proxy.sessions.live_sessions import TRUST_S, SessionCache, key_hash
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.settings import PolicySettings
from rolltap.types import CallKind, Flaw, Outcome, Session, VersionSpan
from tests.unit.proxy.conftest import ToldEngine, serve

TURN = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
USER = {"role": "user", "content": "list the files"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]


async def test_a_second_turn_continues_the_first_token_for_token(plane: Any) -> None:
    plane.engine.replies = [TURN, "done<|im_end|>"]
    first = (await plane.client.chat(USER, tools=TOOLS)).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "a.txt"}
    answer = await plane.client.chat(USER, first, result, tools=TOOLS)
    assert answer.json()["choices"][0]["message"]["content"] == "done"
    one, two = await plane.rows()
    context = np.concatenate([one.prompt_ids, one.completion.output_ids])
    assert list(plane.engine.seen[1].prompt_ids[: len(context)]) == context.tolist()
    assert two.intent.parent_id == one.intent.id
    assert two.intent.shared == len(context)
    assert two.intent.break_ is None
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(context)


async def test_an_engine_error_before_the_first_byte_has_its_own_status(plane: Any) -> None:
    plane.engine.failure = RateLimited("asks to wait", retry_after=3)
    plane.engine.replies = ["<|im_end|>"]
    answer = await plane.client.chat(USER)
    assert answer.status == 429
    assert answer.headers["retry-after"] == "3"
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.ENGINE_ERROR


async def test_a_store_that_fails_at_the_end_withholds_the_reply(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(completion: Any) -> None:
        raise StoreUnavailable("disk full")

    monkeypatch.setattr(plane.log, "append_completion", refuse)
    answer = await plane.client.chat(USER)
    assert answer.status == 503


class WildEngine(ToldEngine):
    """Says that it sampled `wild`."""

    wild = 0

    async def sample(self, request: SampleRequest, take: Take) -> None:
        take(SampleChunk([self.wild], [-0.5], "stop"))


@pytest.mark.parametrize("wild", [-1, 2**31, 2**70])
async def test_a_number_that_is_no_token_id_is_the_engines_error(plane: Any, tokenizer: Any, wild: int) -> None:
    engine = WildEngine(tokenizer)
    engine.wild = wild
    answer = await serve(plane.log, engine, plane.session, plane.limits).client.chat(USER)
    assert (answer.status, answer.json()["error"]["code"]) == (502, "engine_protocol_error")
    (row,) = await plane.rows()
    assert (row.completion.outcome, len(row.completion.output_ids)) == (Outcome.ENGINE_ERROR, 0)


class RepetitiveEngine(ToldEngine):
    """Ends for a reason that rolltap does not know."""

    async def sample(self, request: SampleRequest, take: Take) -> None:
        take(SampleChunk([5, 6], [-0.5, -0.25], "stop", (VersionSpan(0, 0, 2),), unknown_finish="repetition"))


async def test_an_end_for_an_unknown_reason_is_a_reply_with_a_remark(plane: Any, tokenizer: Any) -> None:
    answer = await serve(plane.log, RepetitiveEngine(tokenizer), plane.session, plane.limits).client.chat(USER)
    assert (answer.status, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
    (row,) = await plane.rows()
    call = row.call()
    assert (row.completion.outcome, call.output_ids.tolist(), call.trainable) == (Outcome.COMPLETED, [5, 6], True)
    assert "'repetition'" in call.remark


async def test_every_choice_is_a_call_of_its_own(plane: Any) -> None:
    plane.engine.replies = ["one<|im_end|>", "two<|im_end|>"]
    answer = await plane.client.chat(USER, n=2)
    texts = {choice["message"]["content"] for choice in answer.json()["choices"]}
    assert texts == {"one", "two"}
    assert len(await plane.rows()) == 2


async def test_a_stop_string_ends_the_call_and_its_record(plane: Any) -> None:
    plane.engine.replies = ["abc STOP def ghi jkl<|im_end|>"]
    answer = await plane.client.chat(USER, stop="STOP")
    assert answer.json()["choices"][0]["message"]["content"] == "abc "
    (row,) = await plane.rows()
    call = row.call()
    assert len(call.logprobs) == len(call.output_ids) == call.versions[-1].end
    assert plane.engine.cancelled == 1


async def test_a_stop_string_ends_a_reply_that_comes_whole(plane: Any) -> None:
    """An unfinished block is text, which is known only at the end."""
    plane.engine.replies = ["abc <tool_call>\n{def STOP ghi jkl<|im_end|>"]
    answer = await plane.client.chat(USER, stop="STOP", tools=TOOLS)
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc <tool_call>\n{def ", "stop")
    (row,) = await plane.rows()
    call = row.call()
    assert plane.engine.tokenizer.decode(call.output_ids.tolist()).endswith("STOP")
    assert len(call.logprobs) == len(call.output_ids) == call.versions[-1].end


async def test_an_unreadable_tool_call_is_recorded_as_such(plane: Any) -> None:
    plane.engine.replies = ["<tool_call>\n{broken\n</tool_call><|im_end|>"]
    await plane.client.chat(USER, tools=TOOLS)
    (row,) = await plane.rows()
    assert row.completion.flaw is Flaw.TOOL_CALL_UNPARSABLE


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        (b"{not json", 400, b"JSON"),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, b"other"),
        (b'{"model": "tiny"}', 400, b"messages"),
        (b'{"model": "tiny", "messages": "x"}', 400, b"messages"),
        (b" " * 1_000_001, 413, b"1000000"),
    ],
)
async def test_a_bad_request_is_named(plane: Any, body: bytes, status: int, named: bytes) -> None:
    answer = await plane.client.post("/v1/chat/completions", body)
    assert answer.status == status
    assert named in answer.body
    assert "error" in answer.json()
    assert plane.engine.seen == []


async def test_a_refused_request_of_a_known_session_is_recorded(plane: Any) -> None:
    await plane.client.post("/v1/chat/completions", b"{not json")
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.REFUSED
    assert b"not json" in row.intent.request.head


async def test_a_prompt_that_does_not_fit_is_refused(plane: Any) -> None:
    answer = await plane.client.chat({"role": "user", "content": "word " * 5000})
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("long", [40_000, 180_000])
async def test_before_the_engine_has_answered_nobody_knows_what_fits(plane: Any, long: int) -> None:
    """Agents that start while the engine loads try again; "prompt is too long" ends them for good."""
    source, words = plane.policy.source, {"role": "user", "content": "word " * long}
    plane.policy.source = replace(source, max_context=0)
    answer = await plane.client.chat(words)
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    plane.policy.source.learn(await plane.engine.probe())
    assert (await plane.client.chat(words)).status == 400


async def test_the_setting_of_the_context_counts_before_the_engine_has_answered(plane: Any) -> None:
    settings = PolicySettings(engine="told", max_context=100_000)
    plane.policy.source = replace(plane.policy.source, max_context=0, settings=settings)
    assert (await plane.client.chat({"role": "user", "content": "word " * 40_000})).status == 200
    assert (await plane.client.chat({"role": "user", "content": "word " * 180_000})).status == 400


async def test_keys(plane: Any) -> None:
    assert (await plane.client.chat(USER, key="unknown")).status == 401
    assert (await plane.client.post("/s/other/v1/chat/completions", {"model": "tiny"})).status == 401
    path = f"/s/{plane.session.id}/v1/chat/completions"
    assert (await plane.client.post(path, {"model": "tiny", "messages": [USER]})).status == 200


async def test_a_closed_session_is_refused_and_nothing_changes(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await plane.client.chat(USER)
    await plane.log.close_session(plane.session.id, time.time())
    later = time.monotonic() + TRUST_S
    monkeypatch.setattr("rolltap.proxy.sessions.live_sessions.time.monotonic", lambda: later)
    answer = await plane.client.chat(USER)
    assert answer.status == 409
    assert len(await plane.rows()) == 1


async def test_an_expired_key_is_refused(plane: Any) -> None:
    expired = replace(plane.session, id="old", key_hash="h", expires_at=time.time() - 1)
    from rolltap.proxy.sessions.live_sessions import key_hash

    await plane.log.open_session(replace(expired, key_hash=key_hash("old-key")))
    assert (await plane.client.chat(USER, key="old-key")).status == 409


async def test_capture_finds_the_session_by_what_the_calls_say(plane: Any) -> None:
    plane.engine.replies = ["hello<|im_end|>", "hi<|im_end|>", "bye<|im_end|>"]
    first = (await plane.client.chat(USER, key="project-key")).json()["choices"][0]["message"]
    await plane.client.chat({"role": "user", "content": "something else"}, key="project-key")
    await plane.client.chat(USER, first, {"role": "user", "content": "and?"}, key="project-key")
    captured = [session for session in await plane.log.sessions() if session.id != plane.session.id]
    sizes = sorted([len(await plane.rows(session.id)) for session in captured])
    assert sizes == [1, 2]


async def test_a_captured_session_takes_any_model_name(plane: Any) -> None:
    answer = await plane.client.chat(USER, model="gpt-5.5", key="project-key")
    assert (answer.status, answer.json()["model"]) == (200, "gpt-5.5")
    assert (await plane.client.chat(USER, model="gpt-5.5")).status == 404


async def test_too_many_calls_at_once_are_told_to_wait(plane: Any) -> None:
    plane.engine.hold = asyncio.Event()
    body = {"model": "tiny", "messages": [USER]}
    tasks = [plane.client.start("/v1/chat/completions", body)[2] for _ in range(4)]
    while len(plane.engine.seen) < 4:  # noqa: ASYNC110  the engine's log is the event
        await asyncio.sleep(0)
    answer = await plane.client.chat(USER)
    assert answer.status == 429
    plane.engine.hold.set()
    await asyncio.gather(*tasks)


async def test_models(plane: Any) -> None:
    answer = await plane.client.post("/v1/models", b"", method="GET")
    assert [model["id"] for model in json.loads(answer.body)["data"]] == ["tiny"]


async def test_a_request_that_names_a_recorded_reply_gets_its_history(plane: Any) -> None:
    plane.engine.replies = ["hello<|im_end|>", "again<|im_end|>"]
    first = (await plane.client.post("/v1/responses", {"model": "tiny", "input": "hi"})).json()
    body = {"model": "tiny", "input": "and?", "previous_response_id": first["id"]}
    answer = await plane.client.post("/v1/responses", body)
    assert answer.status == 200
    one, two = await plane.rows()
    assert two.intent.parent_id == one.intent.id
    assert two.intent.break_ is None
    answer = await plane.client.post("/v1/responses", {**body, "previous_response_id": "resp_unknown"})
    assert answer.status == 400
    assert b"previous_response_id" in answer.body


async def test_log_probs_are_given_to_who_asks(plane: Any) -> None:
    body = {"model": "tiny", "messages": [USER], "logprobs": True}
    answer = await plane.client.post("/v1/chat/completions", body)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [-0.5] * len(content)
    assert "".join(token["token"] for token in content).startswith("ok")
    assert b"".join(bytes(token["bytes"]) for token in content).startswith(b"ok")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
GEMINI = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
STRUCTURED = {
    "/v1/chat/completions": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        "response_format",
    ),
    "/v1/responses": (
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        "text.format",
    ),
    "/v1/messages": (
        {"max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
    ),
    "/v1beta/models/tiny:generateContent": (
        {**GEMINI, "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}},
        "generationConfig.responseJsonSchema",
    ),
}


@pytest.mark.parametrize("path", STRUCTURED)
@pytest.mark.parametrize("able", [True, False])
async def test_structured_output_reaches_the_engine_or_is_refused_by_name(plane: Any, path: str, able: bool) -> None:
    fields, named = STRUCTURED[path]
    plane.policy.source.structured_output = able
    common: dict[str, Any] = {} if "generate" in path else {"model": "tiny"}
    common |= {"messages": [USER]} if path.endswith(("completions", "messages")) else {}
    answer = await plane.client.post(path, {**common, **fields})
    if able:
        assert answer.status == 200
        assert plane.engine.seen[0].extra["json_schema"] == SCHEMA
    else:
        assert answer.status == 400
        assert named.encode() in answer.body
        assert plane.engine.seen == []


@pytest.mark.parametrize("asked", [{}, {"reasoning_effort": "high"}])
async def test_structured_output_is_sampled_without_thinking(plane: Any, asked: dict[str, Any]) -> None:
    """The engine's grammar begins with the first token: in a thinking prompt, the JSON would be the thinking."""
    plane.engine.replies = ['{"n": 17}<|im_end|>']
    fields = STRUCTURED["/v1/chat/completions"][0]
    answer = await plane.client.post("/v1/chat/completions", {"model": "tiny", "messages": [USER], **fields, **asked})
    assert answer.json()["choices"][0]["message"]["content"] == '{"n": 17}'
    prompt = plane.engine.tokenizer.decode(list(plane.engine.seen[0].prompt_ids))
    assert prompt.endswith("<think>\n\n</think>\n\n")
    (row,) = await plane.rows()
    assert "thinking" in row.intent.shape.unapplied


async def test_structured_output_begins_behind_the_thinking_of_an_engine_with_grammars(plane: Any) -> None:
    plane.policy.source.grammars = True
    plane.engine.replies = ['<think>\nSeventeen.\n</think>\n\n{"n": 17}<|im_end|>'] * 2
    fields = STRUCTURED["/v1/chat/completions"][0]
    body = {"model": "tiny", "messages": [USER], **fields}
    answer = await plane.client.post("/v1/chat/completions", body)
    assert answer.json()["choices"][0]["message"]["content"] == '{"n": 17}'
    tokenizer = plane.engine.tokenizer
    open_, close = map(tokenizer.convert_tokens_to_ids, ("<think>", "</think>"))
    assert plane.engine.seen[0].extra == {"json_schema": SCHEMA, "thinking": {"close": close, "open": open_}}
    assert not tokenizer.decode(list(plane.engine.seen[0].prompt_ids)).endswith("</think>\n\n")
    unthinking = await plane.client.post("/v1/chat/completions", {**body, "reasoning_effort": "none"})
    assert unthinking.status == 200
    assert plane.engine.seen[1].extra == {"json_schema": SCHEMA}
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "walk")]
    demanding = {"model": "tiny", "messages": [USER], "tools": tools, "tool_choice": "required"}
    assert (await plane.client.post("/v1/chat/completions", demanding)).status == 200
    assert plane.engine.seen[2].extra["grammar"].count("%json") == 2
    rows = await plane.rows()
    shapes = [row.intent.shape for row in rows]
    assert [shape.constrained for shape in shapes] == [True] * 3
    assert len(rows[2].intent.sampling_sent["grammar"]) == 32
    assert not any("tool_choice" in shape.unapplied for shape in shapes)


async def test_a_model_that_always_thinks_refuses_structured_output_by_name(plane: Any) -> None:
    plane.policy.source.continuation.renderer.opens_thinking = True
    fields, named = STRUCTURED["/v1/chat/completions"]
    answer = await plane.client.post("/v1/chat/completions", {"model": "tiny", "messages": [USER], **fields})
    assert (answer.status, plane.engine.seen) == (400, [])
    assert named.encode() in answer.body
    assert b"always thinks" in answer.body


async def test_a_commit_that_was_reported_as_failed_trains_no_reply_that_nobody_got(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion is stored, but its commit's answer is lost: the client gets an error and gives up."""
    append = plane.log.append_completion

    async def lose_the_answer(completion: Any) -> None:
        await append(completion)
        raise StoreUnavailable("the connection was closed in the middle of an operation")

    monkeypatch.setattr(plane.log, "append_completion", lose_the_answer)
    assert (await plane.client.chat(USER)).status == 503
    (row,) = await plane.rows()
    assert row.completion.outcome is Outcome.COMPLETED
    assert row.delivered is False
    assert reconstruct([row.call()]).counts["trained_calls"] == 0


async def test_an_unrecorded_reply_is_no_part_of_a_later_prompts_record(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has read the text of a call whose completion the store refused, and goes on from it."""

    async def refuse(completion: Any) -> None:
        raise StoreUnavailable("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(plane.log, "append_completion", refuse)
        with pytest.raises(BrokenReply):
            await plane.client.chat(USER, stream=True)
    await plane.client.chat(USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"})
    one, two = await plane.rows()
    assert one.completion is None
    assert two.prompt_ids.tolist() == list(plane.engine.seen[1].prompt_ids)


async def test_a_session_that_is_let_go_while_it_is_looked_up_is_served(
    plane: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = SessionCache(plane.log, capacity=1)
    first = await sessions.enter("key", None)
    now = time.time()
    await plane.log.open_session(Session(new_id(), "tiny", key_hash("other"), now, now + 3600))
    look_up = plane.log.session_by_key

    async def slowly(hashed: str) -> Any:
        if hashed == key_hash("key"):
            await sessions.enter("other", None)
        return await look_up(hashed)

    monkeypatch.setattr(plane.log, "session_by_key", slowly)
    first.trusted_until = 0.0
    assert (await sessions.enter("key", None)).session.id == plane.session.id


async def test_a_captured_session_that_has_ended_is_not_continued(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = {"role": "user", "content": "hi"}
    said = (await plane.client.chat(ask, key="project-key")).json()["choices"][0]["message"]["content"]
    history = [ask, {"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    later = time.time() + 7200
    monkeypatch.setattr("rolltap.proxy.sessions.live_sessions.time.time", lambda: later)
    assert (await plane.client.chat(*history, key="project-key")).status == 200
    ended, opened = [session for session in await plane.log.sessions() if session.id != plane.session.id][::-1]
    assert ended.expires_at < later < opened.expires_at
    assert [len(await plane.rows(session.id)) for session in (ended, opened)] == [1, 1]


@pytest.mark.parametrize("kind", [CallKind.JUDGE, CallKind.SIMULATOR])
async def test_the_sessions_tag_says_what_its_calls_are_for(plane: Any, kind: CallKind) -> None:
    """An evaluator's judge may be the very policy that is trained: its calls are not the agent's all the same."""
    now = time.time()
    await plane.log.open_session(Session(new_id(), "tiny", key_hash("other"), now, now + 60, tags={"kind": kind.value}))
    assert (await plane.client.chat(USER, key="other")).status == 200
    (session,) = [session for session in await plane.log.sessions() if session.tags]
    (row,) = await plane.rows(session.id)
    assert row.intent.kind is kind
    assert not reconstruct([row.call()]).segments or not reconstruct([row.call()]).segments[0].loss_mask.any()
