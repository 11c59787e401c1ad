"""Requests that name recorded replies get their whole history back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from rolltap.errors import InvalidRequest
from rolltap.protocols.base import FindCall, RecordedCall
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import TOOL_RESULT_UNMATCHED, Message, Text, ToolCall
from rolltap.protocols.history import Linker
from rolltap.protocols.openai_responses import recall as recalling

LOOK = ToolCall("call_1", "look", "{}")
recall = partial(recalling.recall, linker=Linker(CacheSpace()))


def lookup(records: Mapping[str, RecordedCall]) -> FindCall:
    async def find(handle: str) -> RecordedCall | None:
        return records.get(handle)

    return find


def shape(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in messages]


async def test_a_chain_of_replies_is_the_whole_history(parse: Any) -> None:
    first = parse("openai_responses", input="one", instructions="Old rules.")
    second = parse("openai_responses", input="two", previous_response_id="resp_1")
    third = parse(
        "openai_responses",
        input=[{"type": "function_call_output", "call_id": "call_1", "output": "soil"}],
        previous_response_id="resp_2",
        instructions="New rules.",
    )
    records = {
        "resp_1": RecordedCall(first, Message("assistant", (Text("uno"),))),
        "resp_2": RecordedCall(second, Message("assistant", (Text("dos"),), (LOOK,))),
    }
    whole = await recall(third, lookup(records))
    assert shape(whole.messages) == [
        ("system", "New rules."),
        ("user", "one"),
        ("assistant", "uno"),
        ("user", "two"),
        ("assistant", "dos"),
        ("tool", "soil"),
    ]
    assert whole.messages[-1].name == "look"
    assert (whole.previous, whole.recalls) == (None, False)


async def test_references_are_replaced_by_the_replies_they_name(parse: Any) -> None:
    items = [
        {"role": "user", "content": "look"},
        {"type": "item_reference", "id": "rs_1"},
        {"type": "item_reference", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "soil"},
    ]
    reply = Message("assistant", (Text("uno"),), (LOOK,))
    chat = parse("openai_responses", input=items)
    whole = await recall(chat, lookup({"rs_1": RecordedCall(chat, reply)}))
    assert whole.messages[1] is reply
    assert shape(whole.messages) == [("user", "look"), ("assistant", "uno"), ("tool", "soil")]


LOOKS = (ToolCall("call_1", "look", "{}"), ToolCall("call_2", "look", '{"at": 1}'))
OUTPUTS = [{"type": "function_call_output", "call_id": call.id, "output": call.id} for call in LOOKS]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("second", [{"type": "item_reference", "id": "fc_2"}, None])
async def test_a_turn_that_is_named_item_by_item_is_one(
    parse: Any, interleaved: bool, second: dict[str, str] | None
) -> None:
    """Items beside the named ones may be sent in full."""
    reply = Message("assistant", (Text("uno"),), LOOKS)
    literal = {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": '{"at": 1}'}
    named = [{"type": "item_reference", "id": "msg_1"}, {"type": "item_reference", "id": "fc_1"}]
    calls = [*named, OUTPUTS[0], second or literal] if interleaved else [*named, second or literal, OUTPUTS[0]]
    chat = parse("openai_responses", input=[{"role": "user", "content": "look"}, *calls, OUTPUTS[1]])
    whole = await recall(chat, lookup(dict.fromkeys(("msg_1", "fc_1", "fc_2"), RecordedCall(chat, reply))))
    assert whole.messages[1] == reply
    assert shape(whole.messages[2:]) == [("tool", "call_1"), ("tool", "call_2")]


async def test_an_edited_item_beside_a_named_one_is_not_lost(parse: Any) -> None:
    reply = Message("assistant", (Text("uno"),), (LOOK,))
    edited = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "edited"}'}
    items = [{"role": "user", "content": "look"}, {"type": "item_reference", "id": "msg_1"}, edited, OUTPUTS[0]]
    chat = parse("openai_responses", input=items)
    whole = await recall(chat, lookup({"msg_1": RecordedCall(chat, reply)}))
    assert whole.messages[1].text == "uno"
    assert [call.arguments for call in whole.messages[1].tool_calls] == ['{"at": "edited"}']


async def test_what_names_nothing_is_its_own_history(parse: Any) -> None:
    chat = parse("openai_responses")
    assert await recall(chat, lookup({})) is chat


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_9"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_9"}]}, "input"),
    ],
)
async def test_an_unknown_name_is_refused(parse: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await recall(parse("openai_responses", **fields), lookup({}))
    assert raised.value.param == param


async def test_a_result_that_answers_no_recorded_call_is_marked(parse: Any) -> None:
    result = {"type": "function_call_output", "call_id": "call_9", "output": "soil"}
    chat = parse("openai_responses", input=[result], previous_response_id="resp_1")
    records = {"resp_1": RecordedCall(parse("openai_responses"), Message("assistant", (Text("uno"),)))}
    whole = await recall(chat, lookup(records))
    assert whole.messages[-1].marks == (TOOL_RESULT_UNMATCHED,)


async def test_a_long_chain_needs_no_recursion(parse: Any) -> None:
    reply = Message("assistant", (Text("ok"),))
    records: dict[str, RecordedCall] = {"resp_0": RecordedCall(parse("openai_responses"), reply)}
    link: Any = parse("openai_responses", previous_response_id="resp_0")
    for index in range(1, 3000):
        records[f"resp_{index}"] = RecordedCall(link, reply)
        link = parse("openai_responses", previous_response_id=f"resp_{index}")
    assert len((await recall(link, lookup(records))).messages) == 6001
