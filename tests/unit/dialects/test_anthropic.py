"""Messages: blocks as canonical messages, deferred tools, and what is refused."""

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
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    ToolChoice,
    Usage,
)
from rolltap.proxy.continuation.canonical import message_digest
from tests.dialects import DIALECTS

USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "bed"}}
TURN = {"role": "assistant", "content": [USE]}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}

PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}


def result(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(content), **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def test_the_billing_header_never_reaches_the_model(parse: Any) -> None:
    system = [text("x-anthropic-billing-header: cc_version=1.2.abc;"), text("Be brief."), text("\nAnd kind.")]
    chat = parse("anthropic", system=system)
    assert chat.messages[0].text == "Be brief.\n\nAnd kind."
    assert b"billing-header" in chat.fixed["system"]
    assert [message.role for message in parse("anthropic", system=system[:1]).messages] == ["user"]


def test_a_message_is_the_same_as_text_and_as_a_block_with_a_breakpoint(parse: Any) -> None:
    block = user(text("hi", cache_control={"type": "ephemeral"}))
    plain, blocks = (parse("anthropic", messages=[message]).messages[0] for message in (USER, block))
    assert message_digest(plain) == message_digest(blocks)


def test_system_messages_stay_where_they_stand(parse: Any) -> None:
    system = {"role": "system", "content": "It rains.", "output_config": {"effort": "medium"}}
    chat = parse("anthropic", messages=[USER, system, USER])
    assert [message.role for message in chat.messages] == ["user", "system", "user"]


def test_results_become_tool_messages_before_the_rest(parse: Any) -> None:
    chat = parse("anthropic", messages=[USER, TURN, user(result(text("soil"), PNG, is_error=True), text("go on"))])
    tool, after = chat.messages[2:]
    assert tool.parts == (Text("soil"), Image("data:image/png;base64,aGk="))
    assert (tool.role, tool.tool_call_id, tool.name, tool.is_error) == ("tool", "t1", "look", True)
    assert (after.role, after.text) == ("user", "go on")


def test_thinking_keeps_its_signature(parse: Any) -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "call_s"},
        {"type": "redacted_thinking", "data": "call_r"},
        text("ok"),
    ]
    chat = parse("anthropic", messages=[USER, {"role": "assistant", "content": blocks}, USER])
    assert chat.messages[1].parts == (Reasoning("hm", "call_s"), Reasoning("", "call_r"), Text("ok"))


@pytest.mark.parametrize("broken", ['{"place": bed}', '{"depth": NaN}', '{"depth": -Infinity, "place": "be'])
def test_arguments_that_were_no_json_come_back_as_they_were(parse: Any, broken: str) -> None:
    chat = parse("anthropic", tools=[LOOK])
    ended = ReplyEnded((Choice(Message("assistant", (), (ToolCall("t1", "look", broken),)), "tool_calls"),), Usage())
    content = json.loads(DIALECTS["anthropic"].reply(chat, ReplyStarted("c", 0, "m"), ended))["content"]
    assert content[0]["input"] == {"__unparsedToolInput": {"raw": broken, "len": len(broken)}}
    echoed = parse("anthropic", messages=[USER, {"role": "assistant", "content": content}, user(result())])
    assert echoed.messages[1].tool_calls[0].arguments == broken


def test_arguments_over_several_lines_stay_on_one(parse: Any) -> None:
    writer = DIALECTS["gemini"].writer(parse("gemini"))
    for event in (ReplyStarted("c", 0, "m"), ToolCallStarted(0, "t", "look"), ToolCallDelta(0, '{\n\r\n"a":\n1}')):
        writer.write(event)
    writer.write(ToolCallEnded(0))
    last = writer.write(ReplyEnded((Choice(Message("assistant"), "tool_calls"),), Usage()))
    assert last.count(b"\n") == 2
    part = json.loads(last[6:])["candidates"][0]["content"]["parts"][0]
    assert part["functionCall"]["args"] == {"a": 1}


def test_deferred_tools_wait_until_they_are_named(parse: Any) -> None:
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    tools = [search, {**LOOK, "defer_loading": True}]
    use = {**USE, "name": "ToolSearch"}
    found = user(result({"type": "tool_reference", "tool_name": "look"}))
    before = parse("anthropic", tools=tools)
    after = parse("anthropic", tools=tools, messages=[USER, {"role": "assistant", "content": [use]}, found])
    assert [tool.name for tool in before.tools] == [tool.name for tool in after.tools] == ["ToolSearch"]
    assert json.loads(after.messages[2].text)["function"] == {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object"},
    }


def test_nothing_is_deferred_for_the_vendors_own_search(parse: Any) -> None:
    tools = [{"type": "tool_search_tool_bm25_20251119", "name": "search"}, {**LOOK, "defer_loading": True}]
    assert [tool.name for tool in parse("anthropic", tools=tools).tools] == ["look"]


def test_the_vendors_searches_are_left_out(parse: Any) -> None:
    tools = [{"type": "web_search_20250305", "name": "web_search"}, {"type": "custom", **LOOK}]
    assert [tool.name for tool in parse("anthropic", tools=tools).tools] == ["look"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice("auto")),
        ({"type": "none"}, ToolChoice("none")),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required", parallel=False)),
        ({"type": "tool", "name": "look"}, ToolChoice("named", ("look",))),
    ],
)
def test_tool_choice(parse: Any, choice: Any, expected: ToolChoice) -> None:
    assert parse("anthropic", tools=[LOOK], tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({"thinking": {"type": "disabled"}}, "thinking", False),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking", True),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking", True),
        ({"output_config": {"effort": "medium"}}, "effort", "medium"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "json_schema",
            {"type": "object"},
        ),
        ({"stop_sequences": ["a", "b"]}, "stop", ("a", "b")),
        ({"top_k": 5}, "top_k", 5),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, "max_tokens", 9),
    ],
)
def test_sampling(parse: Any, fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(parse("anthropic", **fields).sampling, name) == value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "assistant", "content": [USE, USE]}, USER]}, "messages[1]"),
        ({"messages": [USER, TURN]}, "messages[1]"),
        ({"messages": [user(USE)]}, "messages[0].content[0].type"),
        (
            {"messages": [user({"type": "document", "source": {"type": "base64"}})]},
            "messages[0].content[0].source.media_type",
        ),
        ({"messages": [user({**PNG, "source": {**PNG["source"], "data": "!"}})]}, "messages[0].content[0].source.data"),
        ({"messages": [USER, {"role": "assistant", "content": [PNG]}, USER]}, "messages[1].content[0].type"),
        (
            {"messages": [USER, {"role": "assistant", "content": [{**USE, "input": "x"}]}, USER]},
            "messages[1].content[0].input",
        ),
        ({"messages": [{"role": "system", "content": [PNG]}, USER]}, "messages[0].content[0].type"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name"),
        ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "tool", "name": "nap"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        (
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management.edits[0].type",
        ),
        ({"system": 7}, "system"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field(refusal: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal("anthropic", **fields) == param


def test_counting_needs_no_limit(parse: Any) -> None:
    assert parse("anthropic", path="/v1/messages/count_tokens", max_tokens=None).sampling.max_tokens is None


def test_litellms_stand_in_for_an_empty_text_is_no_text(parse: Any) -> None:
    calls = [{"type": "tool_use", "id": "call_1", "name": "look", "input": {}}]
    stood_in = [{"type": "text", "text": "[System: Empty message content sanitised to satisfy protocol]"}, *calls]
    results = [{"type": "tool_result", "tool_use_id": "call_1", "content": "soil"}]
    question, answer = {"role": "user", "content": "Look."}, {"role": "user", "content": results}
    one, two = (
        parse("anthropic", messages=[question, {"role": "assistant", "content": content}, answer])
        for content in (stood_in, calls)
    )
    assert one.messages == two.messages
