"""What a request asks for beside its prompt is honoured, and tells it apart from a retry."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rolltap.reconstructor.reconstruct import reconstruct

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call>'
USER = {"role": "user", "content": "list the files"}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


async def chat(plane: Any, *messages: Any, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": list(messages or (USER,)), "tools": TOOLS, **fields}
    answer = await plane.client.post("/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return answer


async def message_of(plane: Any, *messages: Any, **fields: Any) -> Any:
    return (await chat(plane, *messages, **fields)).json()["choices"][0]["message"]


def sampled(row: Any, plane: Any) -> str:
    return plane.engine.tokenizer.decode(row.completion.output_ids.tolist())


def masks(rows: list[Any]) -> list[str]:
    return [found.mask for found in reconstruct([row.call() for row in rows]).classifications]


async def test_without_tool_calls_a_sampled_call_is_text(plane: Any) -> None:
    plane.engine.replies = [f"I look.\n{CALL}<|im_end|>", "so<|im_end|>"]
    first = await message_of(plane, tool_choice="none")
    assert first == {"role": "assistant", "content": f"I look.\n{CALL}", "refusal": None}
    await message_of(plane, USER, first, {"role": "user", "content": "and?"})
    rows = await plane.rows()
    assert rows[1].intent.break_ is None
    assert masks(rows) == ["", ""]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_call_at_a_time_ends_the_reply_where_a_second_opens(plane: Any, stream: bool) -> None:
    plane.engine.replies = [f"{CALL}\n{OTHER}<|im_end|>"]
    answer = await chat(plane, parallel_tool_calls=False, stream=stream)
    assert b"pwd" not in answer.body
    row = (await plane.rows())[0]
    assert sampled(row, plane) == f"{CALL}\n"
    assert (row.completion.finish.value, row.completion.flaw, plane.engine.cancelled) == ("tool_calls", None, 1)


async def test_one_call_at_a_time_keeps_the_end_of_a_reply_with_one(plane: Any) -> None:
    plane.engine.replies = [f"{CALL}<|im_end|>"]
    await chat(plane, parallel_tool_calls=False)
    assert sampled((await plane.rows())[0], plane) == f"{CALL}<|im_end|>"


async def test_a_call_that_was_cut_off_is_shown_as_it_was_sampled(plane: Any) -> None:
    plane.engine.replies = ["I look.\n<tool_call>\n{broken"]
    assert (await message_of(plane))["content"] == "I look.\n<tool_call>\n{broken"


ASKED: list[dict[str, Any]] = [
    {"tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"reasoning_effort": "high"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
]


@pytest.mark.parametrize("fields", ASKED)
async def test_requests_that_ask_for_something_else_are_no_retries(plane: Any, fields: Any) -> None:
    await chat(plane)
    await chat(plane, **fields)
    rows = await plane.rows()
    assert "abandoned" not in masks(rows)
    await chat(plane, **fields)
    assert masks(await plane.rows()).count("abandoned") == 1


async def test_a_failed_tool_is_said_to_have_failed(plane: Any) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "bash", "input": {}}
    prompts = []
    for failed in (False, True):
        result = {"type": "tool_result", "tool_use_id": "t1", "content": "no such file", "is_error": failed}
        messages = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        body = {"model": "tiny", "max_tokens": 9, "messages": messages}
        assert (await plane.client.post("/v1/messages", body)).status == 200
        prompts.append(plane.engine.tokenizer.decode(list(plane.engine.seen[-1].prompt_ids)))
    assert prompts[1] == prompts[0].replace("no such file", "[tool error]\nno such file")
    assert masks(await plane.rows()) == ["", ""]


async def test_the_parts_of_a_message_are_lines(plane: Any) -> None:
    parts = [{"type": "text", "text": "first part"}, {"type": "text", "text": "second part"}]
    await chat(plane, {"role": "user", "content": parts})
    assert "first part\nsecond part<" in plane.engine.tokenizer.decode(list(plane.engine.seen[0].prompt_ids))


async def test_reasoning_can_be_sent_back_by_clients_that_did_not_ask_for_it(plane: Any) -> None:
    plane.engine.replies = [f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>", "done<|im_end|>"]
    body: dict[str, Any] = {"model": "tiny", "input": [USER], "tools": [{"type": "function", **TOOLS[0]["function"]}]}
    output = (await plane.client.post("/v1/responses", body)).json()["output"]
    assert output[0]["encrypted_content"]
    empty = {"type": "message", "role": "assistant", "content": ""}
    answered = {"type": "function_call_output", "call_id": output[1]["call_id"], "output": "a.txt"}
    body["input"] = [USER, empty, *output, answered]
    assert (await plane.client.post("/v1/responses", body)).status == 200
    assert (await plane.rows())[1].intent.break_ is None


async def test_a_policy_that_answers_to_any_name(plane: Any) -> None:
    plane.policy.settings = plane.policy.settings.model_copy(update={"aliases": ("*",)})
    assert (await plane.client.chat(USER, model="gpt-9")).status == 200
    models = json.loads((await plane.client.post("/v1/models", b"", method="GET")).body)
    assert [model["id"] for model in models["data"]] == ["tiny"]


async def test_a_trained_policy_is_sent_no_seed(plane: Any) -> None:
    """Every rollout of a group would be the same sample."""
    await chat(plane, seed=7)
    (row,) = await plane.rows()
    assert [request.seed for request in plane.engine.seen] == [None]
    assert row.intent.sampling_asked["seed"] == 7
    assert row.intent.sampling_sent["seed"] is None
    assert row.intent.shape.unapplied == ("seed",)


@pytest.mark.parametrize("update", [{"sampling": "harness"}, {"trainable": False}])
async def test_each_choice_has_a_seed_of_its_own(plane: Any, update: dict[str, Any]) -> None:
    plane.policy.source.settings = plane.policy.settings.model_copy(update=update)
    await chat(plane, seed=7, n=3)
    assert sorted(request.seed for request in plane.engine.seen) == [7, 8, 9]
    assert {row.intent.shape.unapplied for row in await plane.rows()} == {()}
    await chat(plane, seed=2**63 - 1, n=2)
    assert sorted(request.seed for request in plane.engine.seen[3:]) == [-(2**63), 2**63 - 1]
