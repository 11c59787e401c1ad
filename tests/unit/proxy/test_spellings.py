"""Lawful spellings of one reply on the wire of every dialect: the next call continues the recorded tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rolltap.types import BreakReason

CALL = '<tool_call>\n{{"name": "bash", "arguments": {{"command": "{}", "n": 1e3}}}}\n</tool_call>'
REPLY = f"<think>\nLet me see.\n</think>\n\nI look.\n\n{CALL.format('ls')}\n{CALL.format('pwd')}<|im_end|>"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "number"}}}
THINK = "<think>\nLet me see.\n</think>"


def arguments(command: str, number: str = "1000") -> str:
    return f'{{"n":{number}, "command":"{command}"}}'


def chat_call(call_id: str, command: str, **extra: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "bash", "arguments": arguments(command)}, **extra}


def chat(answer: dict[str, Any]) -> dict[str, list[Any]]:
    """Spellings of the reply in Chat, and of edits of it ("edit ...")."""
    one, two = (call["id"] for call in answer["choices"][0]["message"]["tool_calls"])
    calls = [chat_call(one, "ls"), chat_call(two, "pwd", index=1)]
    first = {"role": "tool", "tool_call_id": one, "content": "a.py"}
    second = {"role": "tool", "tool_call_id": two, "content": [{"type": "text", "text": "/"}]}

    def say(content: Any = None, *tool_calls: Any, **extra: Any) -> dict[str, Any]:
        calls_field = {"tool_calls": list(tool_calls)} if tool_calls else {}
        return {"role": "assistant", "content": content} | calls_field | extra

    return {
        "whole": [say("I look.", *calls, refusal=None, function_call=None), first, second],
        "parts": [say([{"type": "text", "text": "I "}, {"type": "text", "text": "look."}], *calls), first, second],
        "results in another order": [say("I look.", *calls), second, first],
        "interleaved": [say("I look.", calls[0]), first, say(None, calls[1]), second],
        "interleaved, text apart": [say("I look."), say(None, calls[0]), first, say("", calls[1]), second],
        "text and calls apart": [say("I look."), say(None, *calls), first, second],
        "text in two": [say("I"), say("look."), say(None, *calls), first, second],
        "thinking in tags apart": [say(THINK), say("I look.", *calls), first, second],
        "thinking in tags": [say(f"{THINK}\n\nI look.", *calls), first, second],
        "thinking as a field apart": [say("", reasoning="Let me see."), say("I look.", *calls), first, second],
        "edit: another command": [say("I look.", calls[0]), first, say(None, chat_call(two, "id")), second],
        "edit: other thinking in tags": [say(THINK.replace("me", "us")), say("I look.", *calls), first, second],
        "edit: other text": [say("I looked."), say(None, *calls), first, second],
        "edit: a call is gone": [say("I look.", calls[0]), first],
    }


def responses(answer: dict[str, Any]) -> dict[str, list[Any]]:
    """Spellings of the reply in Responses."""
    thought, text, *items = answer["output"]
    bare_text = {"role": "assistant", "content": "I look."}
    one, two = (
        {"type": "function_call", "call_id": item["call_id"], "name": "bash", "arguments": arguments(command)}
        for item, command in zip(items, ("ls", "pwd"), strict=True)
    )
    first, second = (
        {"type": "function_call_output", "call_id": item["call_id"], "output": output}
        for item, output in zip(items, ("a.py", "/"), strict=True)
    )
    tagged = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": THINK}]}
    empty = {"type": "reasoning", "summary": [], "content": []}
    return {
        "as it came": [*answer["output"], first, second],
        "without ids": [bare_text, one, two, first, second],
        "call, output, call, output": [thought, text, one, first, two, second],
        "interleaved, without ids": [bare_text, one, first, two, second],
        "thinking in tags, as an item of its own": [tagged, bare_text, one, two, first, second],
        "thinking in tags, interleaved": [tagged, bare_text, one, first, two, second],
        "empty reasoning": [empty, bare_text, one, first, empty, two, second],
        "thinking behind the text": [text, thought, one, two, first, second],
        "outputs in another order": [text, one, two, second, first],
        "references": [
            *({"type": "item_reference", "id": item["id"]} for item in answer["output"][:3]),
            first,
            {"type": "item_reference", "id": items[1]["id"]},
            second,
        ],
        "edit: another command": [bare_text, {**one, "arguments": arguments("id")}, first, two, second],
        "edit: another number": [bare_text, {**one, "arguments": arguments("ls", "1000.5")}, first, two, second],
        "edit: other thinking": [{**tagged, "content": THINK + "!"}, bare_text, one, two, first, second],
    }


def anthropic(answer: dict[str, Any]) -> dict[str, list[Any]]:
    """Spellings of the reply in Messages."""
    thought, text, one, two = answer["content"]
    first, second = (
        {"type": "tool_result", "tool_use_id": block["id"], "content": output}
        for block, output in ((one, "a.py"), (two, "/"))
    )

    def assistant(*blocks: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": list(blocks)}

    def results(*blocks: Any) -> dict[str, Any]:
        return {"role": "user", "content": list(blocks)}

    tagged = {"type": "text", "text": f"{THINK}\n\nI look."}
    return {
        "as it came": [assistant(thought, text, one, two), results(first, second)],
        "results in another order": [assistant(text, one, two), results(second, first)],
        "apart": [assistant(thought), assistant(text), assistant(one, two), results(first, second)],
        "interleaved": [assistant(thought, text, one), results(first), assistant(two), results(second)],
        "thinking with every piece": [
            assistant(thought, text, one),
            results(first),
            assistant(thought, two),
            results(second),
        ],
        "tags": [assistant(tagged, one, two), results(first, second)],
        "edit: words between": [
            assistant(text, one),
            results(first, {"type": "text", "text": "no"}),
            assistant(two),
            results(second),
        ],
        "edit: another command": [
            assistant(text, one),
            results(first),
            assistant({**two, "input": {"command": "id", "n": 1000}}),
            results(second),
        ],
    }


def gemini(answer: dict[str, Any]) -> dict[str, list[Any]]:
    """Spellings of the reply in Gemini's protocol."""
    *texts, one, two = answer["candidates"][0]["content"]["parts"]

    def without_id(part: Any) -> Any:
        return {"functionCall": {"name": "bash", "args": part["functionCall"]["args"]}}

    def model(*parts: Any) -> dict[str, Any]:
        return {"role": "model", "parts": list(parts)}

    def response(part: Any, output: str, *, named: bool = True) -> dict[str, Any]:
        own_id = {"id": part["functionCall"]["id"]} if named else {}
        reply = {"functionResponse": {"name": "bash", "response": {"output": output}, **own_id}}
        return {"role": "user", "parts": [reply]}

    return {
        "as it came": [model(*texts, one, two), response(one, "a.py"), response(two, "/")],
        "interleaved": [model(*texts, one), response(one, "a.py"), model(two), response(two, "/")],
        "interleaved, without ids and signatures": [
            model({"text": "I look."}, without_id(one)),
            response(one, "a.py", named=False),
            model(without_id(two)),
            response(two, "/", named=False),
        ],
        "edit: another name": [
            model(*texts, one),
            response(one, "a.py"),
            model({"functionCall": {**two["functionCall"], "name": "sh"}}),
            response({"functionCall": {**two["functionCall"], "name": "sh"}}, "/"),
        ],
    }


TOOL = {"name": "bash", "description": "", "parameters": SCHEMA}
DIALECTS: dict[str, tuple[str, str, dict[str, Any], Any, Callable[[Any], dict[str, list[Any]]]]] = {
    "chat": (
        "/v1/chat/completions",
        "messages",
        {"model": "tiny", "tools": [{"type": "function", "function": TOOL}]},
        {"role": "user", "content": "go"},
        chat,
    ),
    "responses": (
        "/v1/responses",
        "input",
        {"model": "tiny", "tools": [{"type": "function", **TOOL}]},
        {"role": "user", "content": "go"},
        responses,
    ),
    "anthropic": (
        "/v1/messages",
        "messages",
        {"model": "tiny", "max_tokens": 900, "tools": [{"name": "bash", "description": "", "input_schema": SCHEMA}]},
        {"role": "user", "content": "go"},
        anthropic,
    ),
    "gemini": (
        "/v1beta/models/tiny:generateContent",
        "contents",
        {
            "tools": [{"functionDeclarations": [{"name": "bash", "parametersJsonSchema": SCHEMA}]}],
            "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        },
        {"role": "user", "parts": [{"text": "go"}]},
        gemini,
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
async def test_the_next_call_continues_every_spelling_of_a_reply(plane: Any, name: str) -> None:
    path, field, fields, question, spellings = DIALECTS[name]
    plane.engine.replies = [REPLY]
    answer = await plane.client.post(path, {**fields, field: [question]})
    assert answer.status == 200, answer.body
    (first,) = await plane.rows()
    context = [*first.prompt_ids.tolist(), *first.completion.output_ids.tolist()]
    prompts = []
    for spelling, turn in spellings(answer.json()).items():
        before = {row.intent.id for row in await plane.rows()}
        done = await plane.client.post(path, {**fields, field: [question, *turn]})
        assert done.status == 200, (spelling, done.body)
        (row,) = [row for row in await plane.rows() if row.intent.id not in before]
        if spelling.startswith("edit"):
            assert row.intent.break_ is not None, spelling
            assert row.intent.break_.reason is BreakReason.HISTORY_EDITED, spelling
            continue
        assert row.intent.break_ is None, (spelling, row.intent.break_)
        assert row.intent.parent_id == first.intent.id, spelling
        np.testing.assert_array_equal(row.prompt_ids[: len(context)], context)
        prompts.append(row.prompt_ids.tolist())
    assert all(prompt == prompts[0] for prompt in prompts)
