"""Responses: items as turns, tools of all kinds, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from rolltap.protocols.conversation import (
    TOOL_RESULT_UNMATCHED,
    Choice,
    Image,
    Message,
    Reasoning,
    ReplyEnded,
    ReplyStarted,
    Text,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    ToolChoice,
    Usage,
)
from rolltap.protocols.openai_responses.read import ResponsesReader
from tests.dialects import DIALECTS

USER = {"role": "user", "content": "hi"}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
EXEC = {"type": "custom", "name": "exec", "description": "Runs it.", "format": {"type": "grammar"}}
TEAM = {"type": "namespace", "name": "team", "description": "Others.", "tools": [LOOK]}
OWN = {"type": "namespace", "name": "functions", "description": "", "tools": [EXEC]}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], **fields}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def called(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "look", "arguments": "{}", **fields}


def answered(call_id: str, output: Any = "soil") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def roles(chat: Any) -> list[str]:
    return [message.role for message in chat.messages]


def test_instructions_come_first(parse: Any) -> None:
    chat = parse("openai_responses", instructions="Be brief.", input="hi")
    assert [(message.role, message.text) for message in chat.messages] == [("system", "Be brief."), ("user", "hi")]


def test_the_items_of_one_reply_are_one_turn(parse: Any) -> None:
    items = [USER, thought("hm"), said("ok"), called("a"), called("b"), answered("a"), answered("b")]
    chat = parse("openai_responses", input=items)
    assert roles(chat) == ["user", "assistant", "tool", "tool"]
    turn = chat.messages[1]
    assert (turn.reasoning, turn.text, [call.id for call in turn.tool_calls]) == ("hm", "ok", ["a", "b"])


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([thought("a"), thought("b"), said("ok")], 2),  # a dropped stream's finished item, then the retry
        ([said("a"), said("b")], 2),
        ([said("a"), thought("b")], 2),
        ([said("a"), called("a"), called("b"), said("b"), called("c")], 1),
        ([called("a"), thought("b"), called("c")], 2),
    ],
)
def test_a_new_reply_begins_where_the_order_of_a_reply_ends(parse: Any, items: list[Any], turns: int) -> None:
    assert roles(parse("openai_responses", input=[USER, *items, USER])).count("assistant") == turns


def test_what_names_the_call_is_read(parse: Any) -> None:
    items = [USER, thought("hm", id="rs_1", encrypted_content="call_enc"), said("ok", id="msg_1")]
    turn = parse("openai_responses", input=items).messages[1]
    assert turn.handle == "rs_1"
    assert turn.parts[0] == Reasoning("hm", "call_enc")
    assert parse("openai_responses", input=[USER, said("ok", id="msg_1")]).messages[1].handle == "msg_1"


@pytest.mark.parametrize("content", ["", [], [{"type": "output_text", "text": ""}]])
def test_an_empty_reply_of_ours_is_a_turn(parse: Any, content: Any) -> None:
    item = {"type": "message", "role": "assistant", "content": content}
    chat = parse("openai_responses", input=[USER, {**item, "id": "msg_call_1"}, USER])
    assert roles(chat) == ["user", "assistant", "user"]
    assert (chat.messages[1].text, chat.messages[1].handle) == ("", "msg_call_1")


def test_an_empty_message_of_others_is_skipped(parse: Any) -> None:
    item = {"type": "message", "role": "assistant", "content": "", "id": "msg_1"}
    assert roles(parse("openai_responses", input=[USER, item, USER])) == ["user", "user"]


def test_a_reference_stands_for_a_recorded_reply(parse: Any) -> None:
    items = [USER, *({"type": "item_reference", "id": f"{kind}_call_1"} for kind in ("rs", "msg", "fc")), answered("x")]
    chat = parse("openai_responses", input=items)
    assert roles(chat) == ["user", "assistant", "tool"]
    assert chat.recalls
    assert (chat.messages[1].recall, chat.messages[1].handle) == (True, "rs_call_1")


def test_results_may_answer_a_reply_that_is_only_named(parse: Any) -> None:
    chat = parse("openai_responses", previous_response_id="resp_call_1", input=[answered("x")])
    assert (chat.previous, roles(chat)) == ("resp_call_1", ["tool"])
    assert chat.messages[0].marks == ()
    assert parse("openai_responses", input=[answered("x")]).messages[0].marks == (TOOL_RESULT_UNMATCHED,)


def test_results_hold_text_and_images(parse: Any) -> None:
    output = [
        {"type": "input_text", "text": "a leaf"},
        {"type": "input_image", "image_url": "data:image/png;base64,aGk="},
    ]
    chat = parse("openai_responses", input=[USER, called("a"), answered("a", output)])
    assert chat.messages[2].parts == (Text("a leaf"), Image("data:image/png;base64,aGk="))


def test_namespaces_are_part_of_a_tools_name_but_for_the_default_one(parse: Any) -> None:
    chat = parse("openai_responses", tools=[TEAM, OWN, LOOK, {"type": "web_search", "external_web_access": True}])
    assert [(tool.name, tool.kind, tool.description) for tool in chat.tools] == [
        ("team.look", "function", "Others."),
        ("exec", "custom", "Runs it."),
        ("look", "function", ""),
    ]


def test_calls_of_namespaced_tools_are_split_again(parse: Any) -> None:
    chat = parse("openai_responses", tools=[TEAM, OWN, LOOK])
    calls = (
        ToolCall("call_1", "team.look", "{}"),
        ToolCall("call_2", "exec", "1+1", "custom"),
        ToolCall("call_3", "look", "{}"),
    )
    ended = ReplyEnded((Choice(Message("assistant", (), calls), "tool_calls"),), Usage())
    output = json.loads(DIALECTS["openai_responses"].reply(chat, ReplyStarted("c", 0, "m"), ended))["output"]
    assert [(item["type"], item.get("namespace"), item["name"]) for item in output] == [
        ("function_call", "team", "look"),
        ("custom_tool_call", "functions", "exec"),
        ("function_call", None, "look"),
    ]
    echoed = parse("openai_responses", input=[USER, *output]).messages[1].tool_calls
    assert echoed == calls


def test_tools_may_come_inside_the_input(parse: Any) -> None:
    items = [{"type": "additional_tools", "role": "developer", "tools": [OWN, TEAM]}, USER]
    chat = parse("openai_responses", input=items, tools=[LOOK])
    assert [tool.name for tool in chat.tools] == ["look", "exec", "team.look"]
    assert roles(chat) == ["user"]


def test_an_agents_message_is_input(parse: Any) -> None:
    item = {"type": "agent_message", "author": "/root", "content": [{"type": "input_text", "text": "Dig."}]}
    assert parse("openai_responses", input=[item]).messages[0] == Message("user", (Text("Dig."),))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "look"}, ToolChoice("named", ("look",))),
        ({"type": "function", "name": "look", "namespace": "team"}, ToolChoice("named", ("team.look",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "exec"}]},
            ToolChoice("auto", ("exec",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ToolChoice("none")),
    ],
)
def test_tool_choice(parse: Any, choice: Any, expected: ToolChoice) -> None:
    assert parse("openai_responses", tools=[LOOK, TEAM, OWN], tool_choice=choice).tool_choice == expected


def test_structured_output_and_reasoning(parse: Any) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    asked = parse("openai_responses", text={"format": form, "verbosity": "low"}, reasoning={"effort": "none"}).sampling
    assert (asked.json_schema, asked.thinking) == ({"type": "object"}, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "narrator", "content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"type": "computer_call"}]}, "input[1].type"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [USER, called("a"), called("a")]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [LOOK, OWN, LOOK]}, "tools[2].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "nap"}}, "tool_choice.name"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["the moon"]}, "include[0]"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"reasoning": {"effort": "heroic"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"instructions": 7}, "instructions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_the_field(refusal: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal("openai_responses", **fields) == param


def test_items_that_come_again_have_their_own_ids(parse: Any) -> None:
    """Text may follow a call; then a reply has two messages."""
    writer = DIALECTS["openai_responses"].writer(parse("openai_responses", stream=True))
    for event in (
        ReplyStarted("c", 0, "m", handle="call_h"),
        TextDelta("a"),
        ToolCallStarted(0, "call_1", "look"),
        ToolCallDelta(0, "{}"),
        ToolCallEnded(0),
        TextDelta("b"),
    ):
        writer.write(event)
    last = writer.write(ReplyEnded((Choice(Message("assistant"), "stop"),), Usage()))
    response = json.loads(last.rsplit(b"data: ", 1)[1])["response"]
    assert [item["id"] for item in response["output"]] == ["msg_call_h", "fc_call_1", "msg1_call_h"]


def test_an_empty_reply_is_streamed_as_a_message_without_text(parse: Any) -> None:
    writer = DIALECTS["openai_responses"].writer(parse("openai_responses"))
    writer.write(ReplyStarted("01jd", 1, "m", 1, "call_1"))
    sent = writer.write(ReplyEnded((Choice(Message("assistant"), "stop"),), Usage(1, 1)))
    events = [json.loads(line[6:]) for line in sent.splitlines() if line.startswith(b"data: ")]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    (item,) = events[-1]["response"]["output"]
    assert (item["id"], item["status"], item["content"][0]["text"]) == ("msg_call_1", "completed", "")


def test_a_keep_alive_is_a_numbered_event(parse: Any) -> None:
    writer = DIALECTS["openai_responses"].writer(parse("openai_responses", stream=True))
    assert writer.keep_alive() == b""
    writer.write(ReplyStarted("c", 0, "m"))
    alive = json.loads(writer.keep_alive().split(b"data: ")[1])
    assert (alive["type"], alive["sequence_number"]) == ("response.in_progress", 2)


def test_a_vendors_stream_is_read_as_far_as_it_came() -> None:
    reader = ResponsesReader()
    reader.event(b'{"type": "response.output_item.added", "item": {"type": "reasoning", "summary": []}}')
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    reader.event(msgspec.json.encode({"type": "response.output_item.done", "item": call}))
    reader.event(b'{"type": "response.output_text.delta", "delta": "I lo"}')
    message = reader.choice().message
    assert (message.text, [made.name for made in message.tool_calls]) == ("I lo", ["look"])
