"""Messages that rules put before calls: at their places, once, and without a break, whatever the conversation."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.contract.rules import MessageRule, SessionRules
from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.rendering import TokenRenderer

from .conftest import World

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
THOUGHT = "<think>\nhm\n</think>\n\n"

numbers = st.none() | st.integers(1, 4)
rules = st.lists(st.tuples(numbers, numbers, st.sampled_from(["user", "system"])), min_size=1, max_size=3).map(
    lambda made: SessionRules(
        tuple(
            MessageRule(text=f"<hint {place}> <|im_end|>", call=call, every=every, message_role=role)  # type: ignore[arg-type]
            for place, (call, every, role) in enumerate(made)
        )
    )
)
turns = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5)
"""Whether each reply thinks, and whether it calls a tool."""


def text(role: Any, said: str, **more: Any) -> Message:
    return Message(role, (Text(said),), **more)


def world_with(renderer: TokenRenderer, made: SessionRules) -> World:
    world = World(renderer)
    world.forest = Forest(DigestCache(), made)
    return world


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rules, turns)
def test_every_message_stands_once_where_it_was_put(either: TokenRenderer, made: SessionRules, played: list) -> None:
    world = world_with(either, made)
    history = [text("user", "Begin.")]
    expected: list[str] = ["Begin."]
    for number, (thinks, calls) in enumerate(played, 1):
        due = [rule.text for rule in made.messages if rule.is_for(number)]
        expected += due
        node = world.call(
            *history, output=(THOUGHT if thinks else "") + (CALL if calls else f"said {number}<|im_end|>")
        )
        assert node.break_ is None or node.break_.reason == "thinking_dropped"
        shown = world.tokenizer.decode(node.prompt_ids.tolist())
        places = [shown.index(each) for each in expected if each.startswith(("Begin", "turn"))]
        assert places == sorted(places)
        for rule in made.messages:
            assert shown.count(rule.text) == expected.count(rule.text), shown
        special = world.tokenizer.convert_tokens_to_ids("<|im_end|>")
        ended = node.prompt_ids.tolist().count(special)
        assert ended <= len(history) + len(expected) + 1, "a rule's text closes no turn"
        assert node.reply is not None
        history.append(node.reply)
        if node.reply.tool_calls:
            history.append(text("tool", f"turn {number}", tool_call_id=node.reply.tool_calls[0].id))
        else:
            history.append(text("user", f"turn {number}"))
        expected.append(f"turn {number}")


def test_a_message_after_a_tools_result_drops_no_thinking(either: TokenRenderer) -> None:
    world = world_with(either, SessionRules((MessageRule(text="Hint.", call=2),)))
    first = world.call(text("user", "Look."), output=THOUGHT + CALL)
    assert first.reply is not None
    result = text("tool", "a.py", tool_call_id=first.reply.tool_calls[0].id)
    second = world.call(text("user", "Look."), first.reply, result, output="Done.<|im_end|>")
    assert second.break_ is None
    assert [each.text for each in second.injected] == ["Hint."]
    assert second.shared == first.context_length
    third = [text("user", "Look."), first.reply, result, second.reply, text("user", "And?")]
    dropped = world.call(*third, output="No.<|im_end|>")  # type: ignore[arg-type]
    assert dropped.break_ is not None
    assert dropped.break_.reason == "thinking_dropped"
    assert [(each.place, each.text) for each in dropped.injected] == [(3, "Hint.")]
    assert world.tokenizer.decode(dropped.prompt_ids.tolist()).count("Hint.") == 1
