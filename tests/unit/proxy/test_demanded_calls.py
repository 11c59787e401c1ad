"""A tool that the client demands is called: the prompt ends with the call's beginning, the model samples the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rolltap.reconstructor.reconstruct import reconstruct

from .test_refusals import CHAT_TOOLS, SCHEMA, calling

BEGINNING = '<tool_call>\n{"name": "bash", "arguments":'
REST = ' {"command": "ls"}}\n</tool_call>'
DEMANDS: dict[str, tuple[str, Any, Any]] = {
    "openai_chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "go"}], "tools": CHAT_TOOLS},
        {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
    ),
    "openai_chat, the only one allowed": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "go"}], "tools": CHAT_TOOLS},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": CHAT_TOOLS[:1]}}},
    ),
    "openai_responses": (
        "/v1/responses",
        {"input": "go", "tools": [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]},
        {"tool_choice": {"type": "function", "name": "bash"}},
    ),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 99,
            "messages": [{"role": "user", "content": "go"}],
            "tools": [{"name": name, "input_schema": SCHEMA} for name in ("bash", "look")],
        },
        {"tool_choice": {"type": "tool", "name": "bash"}},
    ),
    "gemini": (
        "/v1beta/models/tiny:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "go"}]}],
            "tools": [{"functionDeclarations": [tool["function"] for tool in CHAT_TOOLS]}],
        },
        calling(mode="ANY", allowedFunctionNames=["bash"]),
    ),
}


def body_of(name: str, *, demands: bool = True, **more: Any) -> tuple[str, Any]:
    path, body, demand = DEMANDS[name]
    model = {} if name == "gemini" else {"model": "tiny"}
    return path, {**model, **body, **(demand if demands else {}), **more}


def seen(plane: Any, at: int = -1) -> str:
    return plane.engine.tokenizer.decode(list(plane.engine.seen[at].prompt_ids))


@pytest.mark.parametrize("name", DEMANDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_call_is_made_and_what_was_sampled_is_trained(plane: Any, name: str, stream: bool) -> None:
    plane.engine.replies = [f"{REST}<|im_end|>"]
    path, body = body_of(name, **({"stream": True} if stream and name != "gemini" else {}))
    if stream and name == "gemini":
        path = path.replace("generateContent", "streamGenerateContent")
    answer = await plane.client.post(path, body, query="alt=sse" if name == "gemini" and stream else "")
    assert answer.status == 200, answer.body
    assert b"bash" in answer.body
    assert b"<tool_call>" not in answer.body
    assert seen(plane).endswith(f"<think>\n\n</think>\n\n{BEGINNING}")
    (row,) = await plane.rows()
    assert plane.engine.tokenizer.decode(row.completion.output_ids.tolist()) == f"{REST}<|im_end|>"
    assert len(row.completion.logprobs) == len(row.completion.output_ids)
    assert (row.completion.finish.value, row.completion.flaw) == ("tool_calls", None)
    assert (row.intent.shape.constrained, row.intent.shape.unapplied) == (False, ("thinking",))
    assert [one.mask for one in reconstruct([row.call()]).classifications] == [""]


async def test_the_conversation_goes_on_and_retries_have_the_same_prompt(plane: Any) -> None:
    """A request that demands nothing is no retry of one that does."""
    plane.engine.replies = [f"{REST}<|im_end|>", f"{REST}<|im_end|>", "no<|im_end|>", "done<|im_end|>"]
    path, body = body_of("openai_chat")
    message = (await plane.client.post(path, body)).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("bash", {"command": "ls"})
    await plane.client.post(path, body)
    await plane.client.post(*body_of("openai_chat", demands=False))
    assert seen(plane, 0) == seen(plane, 1)
    assert BEGINNING not in seen(plane, 2)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "out.txt"}
    history = [*body["messages"], message, result]
    assert (await plane.client.post(*body_of("openai_chat", demands=False, messages=history))).status == 200
    rows = await plane.rows()
    assert rows[3].intent.parent_id == rows[0].intent.id
    assert [row.intent.break_ for row in rows] == [None] * 4
    assert f"{BEGINNING}{REST}<|im_end|>" in seen(plane)


async def test_the_reply_ends_where_a_second_call_would_begin(plane: Any) -> None:
    plane.engine.replies = [f"{REST}\n{BEGINNING}{REST}<|im_end|>"]
    message = (await plane.client.post(*body_of("openai_chat"))).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert plane.engine.cancelled == 1


async def test_a_call_that_goes_wrong_behind_its_beginning_is_flagged(plane: Any) -> None:
    plane.engine.replies = [" nonsense\n</tool_call><|im_end|>"]
    answer = await plane.client.post(*body_of("openai_chat"))
    assert answer.json()["choices"][0]["message"]["content"] == f"{BEGINNING} nonsense\n</tool_call>"
    (row,) = await plane.rows()
    assert row.completion.flaw is not None


async def test_a_schema_of_text_is_not_asked_for_beside_a_demanded_call(plane: Any) -> None:
    plane.engine.replies = [f"{REST}<|im_end|>"]
    schema = {"type": "json_schema", "json_schema": {"name": "reply", "schema": SCHEMA}}
    path, body = body_of("openai_chat", response_format=schema)
    answer = await plane.client.post(path, body)
    assert answer.status == 200, answer.body
    assert "json_schema" not in plane.engine.seen[-1].extra
    (row,) = await plane.rows()
    assert row.intent.shape.constrained is False
    assert [one.mask for one in reconstruct([row.call()]).classifications] == [""]


async def test_each_of_several_choices_goes_on_with_the_call(plane: Any) -> None:
    plane.engine.replies = [f"{REST}<|im_end|>"] * 2
    path, body = body_of("openai_chat", n=2)
    answer = await plane.client.post(path, body)
    choices = json.loads(answer.body)["choices"]
    assert [choice["message"]["tool_calls"][0]["function"]["name"] for choice in choices] == ["bash", "bash"]
    assert [row.intent.shape.constrained for row in await plane.rows()] == [False, False]


async def test_a_list_of_allowed_tools_that_has_all_of_them_asks_for_nothing(plane: Any) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": CHAT_TOOLS}}
    assert (await plane.client.post(*body_of("openai_chat", tool_choice=allowed))).status == 200
    assert (await plane.rows())[0].intent.shape.unapplied == ()
