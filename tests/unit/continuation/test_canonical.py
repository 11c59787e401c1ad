"""What counts as the same message, and what does not."""

from __future__ import annotations

import json

import pytest

from rolltap.proxy.continuation.canonical import canonical_arguments, message_digest, thought_digest
from rolltap.proxy.conversation.chat import Message, Reasoning, Text, ToolCall
from rolltap.proxy.conversation.partial_json import whole_members


def assistant(text: str = "", *calls: tuple[str, str], reasoning: str = "") -> Message:
    parts = ((Reasoning(reasoning),) if reasoning else ()) + ((Text(text),) if text else ())
    return Message("assistant", parts, tuple(ToolCall(f"id{i}", n, a) for i, (n, a) in enumerate(calls)))


SAME = [
    (assistant("", ("bash", '{"a": 1, "b": [true]}')), assistant("", ("bash", '{"b":[true],"a":1.0}'))),
    (assistant("", ("bash", '{"t": "\\u00e9"}')), assistant("", ("bash", '{"t":"é"}'))),
    (assistant("done"), assistant("  done\n")),
    (assistant("done", reasoning="because"), assistant("done")),
    (Message("assistant"), Message("assistant", (Text(""),))),
    (Message("assistant", (Text("ab"),)), Message("assistant", (Text("a"), Text("b")))),
    (Message("user", (Text("a\nb"),)), Message("user", (Text("a"), Text("b")))),
    (Message("system", (Text("s"),)), Message("developer", (Text("s"),))),
    (
        Message("tool", (Text("out"),), tool_call_id="x"),
        Message("tool", (Text("out"),), tool_call_id="y"),
    ),
]

DIFFERENT = [
    (assistant("", ("bash", '{"a": true}')), assistant("", ("bash", '{"a": "true"}'))),
    (assistant("", ("bash", '{"a": 1}')), assistant("", ("sh", '{"a": 1}'))),
    (assistant("", ("bash", "{}"), ("bash", "{}")), assistant("", ("bash", "{}"))),
    (assistant("done"), assistant("Done")),
    (Message("user", (Text("a"),)), Message("user", (Text("a "),))),
    (Message("user", (Text("a"),)), Message("system", (Text("a"),))),
    (Message("tool", (Text("a"),), is_error=True), Message("tool", (Text("a"),))),
    (Message("tool", (Text("a"),), call_offset=1), Message("tool", (Text("a"),))),
    (Message("tool", (Text("a"),), call_offset=1), Message("tool", (Text("a"),), call_offset=-1)),
    (assistant("a", ("b", "{}")), assistant("ab", ("", "{}"))),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_same_in_meaning(one: Message, other: Message) -> None:
    assert message_digest(one) == message_digest(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_an_edit_is_an_edit(one: Message, other: Message) -> None:
    assert message_digest(one) != message_digest(other)


def test_arguments_that_are_not_json_stay_text() -> None:
    assert canonical_arguments(" ls -l ") == "ls -l"
    assert canonical_arguments(' {"a": 1,, "b": 2} ') == '{"a": 1,, "b": 2}'


def test_arguments_that_were_cut_off_are_their_whole_members() -> None:
    for cut in ('{"b": [1, 2], "a": ', '{"a"', '{"a": 1, "b": {"c": "x'):
        assert canonical_arguments(cut) == canonical_arguments(json.dumps(whole_members(cut)))
    assert canonical_arguments('{"a": "x') != canonical_arguments('{"a": "x"}')


def test_arguments_nested_too_deep_for_python_are_text() -> None:
    for size in (600, 100_000):
        deep = '{"a":' * size + "1" + "}" * size
        assert canonical_arguments(f" {deep} ") == deep


def test_thinking_may_be_trimmed_but_not_changed() -> None:
    def digest(thought: str) -> bytes:
        return thought_digest(Message("assistant", (Reasoning(thought), Text("so"))))

    assert digest(" why\n") == digest("why") != digest("how")
    assert digest(" \n") == b""
