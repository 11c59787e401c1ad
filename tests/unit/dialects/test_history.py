"""A history that goes on from a former one is linked from there on, and as if it were linked whole."""

from __future__ import annotations

import pytest

from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import TOOL_RESULT_REPEATED, TOOL_RESULT_UNMATCHED, Message, Text, ToolCall
from rolltap.protocols.history import LONG, Linker

PLACE = "messages[{}]".format


def cycle(*ids: str, tool: str = "look") -> list[Message]:
    """A turn that makes these calls, and their results, which don't name the tool."""
    calls = tuple(ToolCall(id, tool, "{}") for id in ids)
    return [Message("assistant", (), calls), *(Message("tool", (Text("ok"),), tool_call_id=id) for id in ids)]


LONG_AGO = [message for number in range(LONG) for message in cycle(f"c{number}")]


def test_what_is_added_is_linked_as_if_it_were_all_new() -> None:
    linker = Linker(CacheSpace())
    first = linker.link(LONG_AGO, PLACE)
    for added in (cycle("c0", "new", tool="other"), cycle("again"), cycle("c0", tool="third")):
        whole = [*LONG_AGO, *added]
        linked = linker.link(whole, PLACE)
        assert linked == Linker(CacheSpace()).link(whole, PLACE)
        assert all(one is other for one, other in zip(first, linked, strict=False))
        assert linked[-1].name == added[0].tool_calls[0].name


def test_what_was_answered_before_stays_answered() -> None:
    linker = Linker(CacheSpace())
    linker.link(LONG_AGO, PLACE)
    for odd, mark in (("c0", TOOL_RESULT_REPEATED), ("c999", TOOL_RESULT_UNMATCHED)):
        linked = linker.link([*LONG_AGO, Message("tool", (Text("ok"),), tool_call_id=odd)], PLACE)
        assert linked[-1].marks == (mark,)
        assert linked[-1].name == ("look" if odd == "c0" else None)
    assert linker.link(LONG_AGO, PLACE) == Linker(CacheSpace()).link(LONG_AGO, PLACE)


def test_equal_messages_that_are_other_objects_are_linked_anew() -> None:
    linker = Linker(CacheSpace())
    linker.link(LONG_AGO, PLACE)
    shorter = [Message("user", (Text("hi"),)), *LONG_AGO[:2]]
    assert linker.link(shorter, PLACE)[2].name == "look"


def results(*ids: str) -> list[Message]:
    return [Message("tool", (Text("ok"),), tool_call_id=id) for id in ids]


@pytest.mark.parametrize(
    ("answers", "offsets"),
    [
        (["a", "b", "c"], [0, 0, 0]),
        (["c", "a", "b"], [2, -1, -1]),
        (["b"], [1]),
        (["before", "a", "b"], [-2, -1, -1]),
        ([], []),
    ],
)
def test_a_result_says_which_call_it_answers(answers: list[str], offsets: list[int]) -> None:
    """In the calls' order it says nothing, whatever the ids and the turns before."""
    turns = [*cycle("before", "other")[:1], *results("other"), cycle("a", "b", "c")[0]]
    linked = Linker(CacheSpace()).link([*turns, *results(*answers)], PLACE)
    assert [message.call_offset for message in linked] == [0, 1, 0, *offsets]
    following = Linker(CacheSpace()).link([*linked, *cycle("a", "b")], PLACE)
    assert [message.call_offset for message in following[-2:]] == [0, 0]


def test_a_result_on_record_only_says_nothing() -> None:
    assert Linker(CacheSpace()).link(results("a"), PLACE, whole=False)[0].call_offset == 0


@pytest.mark.parametrize(("name", "marks"), [(None, ()), ("look", ()), ("nap", (TOOL_RESULT_UNMATCHED,))])
def test_a_result_without_an_id_answers_the_next_call_of_its_tool(name: str | None, marks: tuple[str, ...]) -> None:
    turn = cycle("a", "b")[:2]
    linked = Linker(CacheSpace()).link([*turn, Message("tool", (Text("ok"),), tool_call_id="", name=name)], PLACE)
    assert (linked[-1].marks, linked[-1].name) == (marks, name or "look")
    assert linked[-1].tool_call_id == ("" if marks else "b")
