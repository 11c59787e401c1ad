"""Chat Completions: what its fields mean, and which are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rolltap.protocols.conversation import (
    Choice,
    Image,
    Message,
    Reasoning,
    ReplyEnded,
    ReplyStarted,
    Text,
    TextDelta,
    ToolCall,
    ToolChoice,
    Usage,
)
from tests.dialects import DIALECTS

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WRITE = {"type": "custom", "custom": {"name": "write", "format": {"type": "text"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TURN = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "soil"}


def test_content_is_text_or_parts(parse: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text, split = (
        parse("openai_chat", messages=[{"role": "user", "content": content}]).messages[0] for content in ("a\nb", parts)
    )
    assert text.text == split.text == "a\nb"


def test_images_are_data_urls_or_remote(parse: Any) -> None:
    for url in ("data:image/png;base64,aGk=", "https://example.org/a.png"):
        content = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
        assert parse("openai_chat", messages=[{"role": "user", "content": content}]).messages[0].parts == (
            Image(url, "low"),
        )


@pytest.mark.parametrize(
    "url",
    [
        "",
        "hello",
        "file:///etc/passwd",
        "data:image/png;base64,",
        "data:image/png;base64,a",
        "data:text/html;base64,aGk=",
    ],
)
def test_other_images_are_refused(refusal: Any, url: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    assert refusal("openai_chat", messages=messages) == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_in_either_field(parse: Any, field: str) -> None:
    chat = parse("openai_chat", messages=[USER, {"role": "assistant", "content": "ok", field: "hm"}, USER])
    assert chat.messages[1].parts == (Reasoning("hm"), Text("ok"))


def test_custom_tools_are_free_text(parse: Any) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "write", "input": "not { json"}}
    turn = {"role": "assistant", "tool_calls": [call]}
    chat = parse("openai_chat", messages=[USER, turn, RESULT], tools=[WRITE, LOOK])
    assert chat.messages[1].tool_calls == (ToolCall("c1", "write", "not { json", "custom"),)
    assert [(tool.name, tool.kind, tool.format) for tool in chat.tools] == [
        ("write", "custom", {"type": "text"}),
        ("look", "function", None),
    ]


def test_a_tool_result_may_have_its_id_in_the_place_of_qwen_agent(parse: Any) -> None:
    chat = parse("openai_chat", messages=[USER, TURN, {"role": "tool", "id": "c1", "content": "soil"}], tools=[LOOK])
    assert (chat.messages[2].tool_call_id, chat.messages[2].name) == ("c1", "look")


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "look"}}, ToolChoice("named", ("look",))),
        ({"type": "custom", "custom": {"name": "write"}}, ToolChoice("named", ("write",))),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [LOOK]}},
            ToolChoice("required", ("look",)),
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, ToolChoice("none")),
    ],
)
def test_tool_choice(parse: Any, choice: Any, expected: ToolChoice) -> None:
    assert parse("openai_chat", tools=[LOOK, WRITE], tool_choice=choice).tool_choice == expected


def test_parallel_calls_can_be_turned_off(parse: Any) -> None:
    assert parse("openai_chat", tools=[LOOK], parallel_tool_calls=False).tool_choice.parallel is False


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5, "max_completion_tokens": 7}, "max_tokens", 7),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"n": 3}, "n", 3),
        ({"seed": -1}, "seed", -1),
        ({"top_k": -1}, "top_k", 0),
        ({"reasoning_effort": "none"}, "thinking", False),
        ({"reasoning_effort": "high"}, "effort", "high"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinking", False),
        ({"enable_thinking": True, "reasoning_effort": "none"}, "thinking", True),
        ({"response_format": {"type": "text"}}, "json_schema", None),
        ({"response_format": {"type": "json_object"}}, "json_schema", {}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
            "json_schema",
            {"type": "array"},
        ),
    ],
)
def test_sampling(parse: Any, fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(parse("openai_chat", **fields).sampling, name) == value


def test_what_changes_nothing_is_let_be(parse: Any) -> None:
    fields = {"store": False, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "verbosity": "low"}
    fields |= {"stream_options": {"include_usage": True}, "modalities": ["text"], "logit_bias": {}, "temperature": None}
    assert parse("openai_chat", **fields).messages[0].text == "hi"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "smell"}]}]}, "messages[1].content[0].type"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL, CALL]}]}, "messages[1]"),
        ({"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]}, "messages[1].function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[0].tool_calls[0].function"),
        (
            {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type",
        ),
        ({"tools": [LOOK, LOOK]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nap"}}, "tools": [LOOK]},
            "tool_choice.function.name",
        ),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"functions": [{"name": "look"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"stream_options": {"colour": True}}, "stream_options.colour"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field(refusal: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal("openai_chat", **fields) == param


def test_schemas_and_arguments_have_a_depth(refusal: Any) -> None:
    schema: Any = {}
    for _ in range(65):
        schema = {"items": schema}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    assert refusal("openai_chat", tools=[tool]) == "tools[0].function.parameters"
    call = {"id": "c", "function": {"name": "look", "arguments": json.dumps(schema)}}
    turn = {"role": "assistant", "tool_calls": [call]}
    assert refusal("openai_chat", messages=[USER, turn]) == "messages[1].tool_calls[0].function.arguments"


def test_a_call_id_may_come_again_in_a_later_turn(parse: Any) -> None:
    chat = parse("openai_chat", messages=[USER, TURN, RESULT, TURN, RESULT], tools=[LOOK])
    assert [message.role for message in chat.messages] == ["user", "assistant", "tool", "assistant", "tool"]


def test_usage_is_sent_only_to_those_who_asked(parse: Any) -> None:
    asked = parse("openai_chat", stream=True, stream_options={"include_usage": True})
    silent = parse("openai_chat", stream=True)
    assert (asked.wire["include_usage"], silent.wire["include_usage"]) == (True, False)


def test_choices_are_told_apart(parse: Any) -> None:
    writer = DIALECTS["openai_chat"].writer(parse("openai_chat", stream=True, n=2))
    ended = ReplyEnded(tuple(Choice(Message("assistant"), "stop", index=i) for i in range(2)), Usage())
    parts = [writer.write(event) for event in (ReplyStarted("c", 0, "m"), TextDelta("b", 1), TextDelta("a", 0), ended)]
    chunks = [json.loads(line[6:]) for line in b"".join(parts).splitlines() if line.startswith(b"data: {")]
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {0: "a", 1: "b"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == ["stop", "stop"]
