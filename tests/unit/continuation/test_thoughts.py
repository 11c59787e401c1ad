"""Conversations that differ in their thinking only are told apart, as far as the harness sends it back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rolltap.calllog.facts import CallCompletion, CallIntent, CallRow, RequestParts
from rolltap.protocols.conversation import Message, Reasoning, Text, ToolCall
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.forest import Forest
from rolltap.types import BreakReason, Finish, Outcome

LIST = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
READ = '<tool_call>\n{"name": "bash", "arguments": {"command": "cat a"}}\n</tool_call><|im_end|>'
ASKED = Message("user", (Text("list"),))


def thinking(thought: str, output: str = LIST) -> str:
    return f"<think>\n{thought}\n</think>\n\n{output}"


def call(command: str = "ls", thought: str = "") -> Message:
    """A turn as a harness sends it back that keeps no ids of ours."""
    parts = (Reasoning(thought),) if thought else ()
    return Message("assistant", parts, (ToolCall(f"own-{command}", "bash", f'{{"command": "{command}"}}'),))


def result(text: str, command: str = "ls") -> Message:
    return Message("tool", (Text(text),), tool_call_id=f"own-{command}")


def extends(plan: Any, node: Any) -> bool:
    context = node.context_ids()
    return plan.break_ is None and np.array_equal(plan.prompt_ids[: len(context)], context)


def read_again(world: Any) -> dict[str, Any]:
    """The calls in a forest that was made from the log."""
    rows = []
    for node in world.forest.nodes.values():
        intent = CallIntent(
            node.call_id,
            "session",
            "process",
            0.0,
            "policy",
            "test",
            node.prompt_ids[node.shared :],
            RequestParts(b"{}"),
            parent_id=node.parent.call_id if node.parent else None,
            shared=node.shared,
            break_=node.break_,
            lineage=msgspec.msgpack.encode(node.lineage),
        )
        reply = msgspec.json.encode(node.reply)
        logprobs = np.zeros(len(node.output_ids), np.float32)
        done = CallCompletion(
            node.call_id, 0.0, Outcome.COMPLETED, Finish.STOP, node.output_ids, logprobs, message=reply
        )
        rows.append(CallRow(intent, node.prompt_ids, done))
    world.forest = Forest(DigestCache())
    world.forest.load(rows)
    return dict(world.forest.nodes)


@pytest.mark.parametrize("restarted", [False, True])
def test_thinking_of_an_earlier_turn_tells_equal_conversations_apart(world: Any, restarted: bool) -> None:
    nodes = {}
    for thought in ("one way", "another way"):
        first = world.call(ASKED, output=thinking(thought))
        nodes[thought] = world.call(ASKED, call(thought=thought), result("a"), output=READ)
        assert nodes[thought].parent is first
    if restarted:
        known = read_again(world)
        nodes = {thought: known[node.call_id] for thought, node in nodes.items()}
    later = (result("a"), call("cat a"), result("text", "cat a"))
    for thought, node in nodes.items():
        plan = world.plan(world.request(ASKED, call(thought=thought), *later))
        assert plan.parent is node
        assert extends(plan, node)
    plan = world.plan(world.request(ASKED, call(), *later))
    assert plan.break_.reason is BreakReason.AMBIGUOUS_PARENT


@pytest.mark.parametrize("restarted", [False, True])
def test_thinking_that_was_changed_turns_ago_is_an_edit(world: Any, restarted: bool) -> None:
    world.call(ASKED, output=thinking("hm"))
    world.call(ASKED, call(thought="hm"), result("a"), output=READ)
    if restarted:
        read_again(world)
    history = (ASKED, call(thought="something else"), result("a"), call("cat a"), result("text", "cat a"))
    plan = world.plan(world.request(*history))
    assert (plan.break_.reason, plan.break_.message_index) == (BreakReason.HISTORY_EDITED, 1)
    assert "something else" in world.tokenizer.decode(plan.prompt_ids.tolist())


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("thought", ["another way", ""])
def test_a_history_from_elsewhere_is_shown_with_the_thinking_that_it_has(
    world: Any, thought: str, restarted: bool
) -> None:
    """Rolltap sampled neither of the two: the second is no repetition of the first."""
    first = world.call(ASKED, call(thought="one way"), result("a"), output="done<|im_end|>")
    if restarted:
        first = read_again(world)[first.call_id]
    assert "one way" in world.tokenizer.decode(first.prompt_ids.tolist())
    plan = world.plan(world.request(ASKED, call(thought=thought), result("a")))
    text = world.tokenizer.decode(plan.prompt_ids.tolist())
    assert "one way" not in text
    assert thought in text
    assert plan.break_.reason is BreakReason.HISTORY_EDITED
    again = world.plan(world.request(ASKED, call(thought="one way"), result("a")))
    assert again.prompt_ids.tolist() == first.prompt_ids.tolist()


def test_a_request_that_could_be_two_calls_repeats_neither(world: Any) -> None:
    """Not even where one of them was continued by a request that reads the same."""
    for thought in ("one way", "another way"):
        first = world.call(ASKED, output=thinking(thought))
    world.call(ASKED, call(thought="another way"), result("a"), output="done<|im_end|>")
    plan = world.plan(world.request(ASKED, call(), result("a")))
    assert plan.break_.reason is BreakReason.AMBIGUOUS_PARENT
    assert "another way" not in world.tokenizer.decode(plan.prompt_ids.tolist())
    assert plan.parent is first


def test_a_request_that_names_its_call_goes_on_from_it_though_it_was_ambiguous_before(world: Any) -> None:
    for thought in ("one way", "another way"):
        last = world.call(ASKED, output=thinking(thought))
    unnamed = world.call(ASKED, call(), result("a"), output="done<|im_end|>")
    assert unnamed.break_.reason is BreakReason.AMBIGUOUS_PARENT
    assert extends(world.plan(world.request(ASKED, call(thought="another way"), result("a"))), last)


def test_equal_tokens_are_no_ambiguity(world: Any) -> None:
    nodes = [world.call(ASKED, output=thinking("hm")) for _ in range(3)]
    plan = world.plan(world.request(ASKED, call(), result("a")))
    assert plan.parent is nodes[-1]
    assert extends(plan, nodes[-1])
