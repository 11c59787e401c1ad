"""The prompt of a call begins with exactly what its parent's engine saw and sampled, or a break says why not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import Message, Reasoning, Text, Tool, ToolCall
from rolltap.protocols.history import Linker
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.plan import drops_thinking
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.types import BreakReason, Outcome

from .conftest import World
from .making import tokenizer_with, trl_template
from .planning import run_steps

TURN = '<tool_call>\n{"name":  "bash", "arguments": {"command": "ls",   "n": 1.0}}\n</tool_call><|im_end|>'


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def tool_result(call: ToolCall, text: str) -> Message:
    return Message("tool", (Text(text),), tool_call_id=call.id)


def extends(plan: Any, node: Any) -> bool:
    context = node.context_ids()
    return plan.break_ is None and np.array_equal(plan.prompt_ids[: len(context)], context)


def test_a_re_serialised_echo_still_gets_the_sampled_tokens(world: Any) -> None:
    first = world.call(user("list"), output=TURN)
    call = first.reply.tool_calls[0]
    echo = Message("assistant", (), (ToolCall("other-id", "bash", '{"n":1,"command":"ls"}'),))
    plan = world.plan(world.request(user("list"), echo, tool_result(call, "a.txt")))
    assert extends(plan, first)
    assert plan.parent is first
    text = world.tokenizer.decode(plan.prompt_ids[plan.shared :].tolist())
    assert text == "\n<|im_start|>user\n<tool_response>\na.txt\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_a_changed_argument_is_an_edit_and_keeps_the_tokens_before_it(world: Any) -> None:
    first = world.call(user("list"), output=TURN)
    second = world.call(
        user("list"), first.reply, tool_result(first.reply.tool_calls[0], "a.txt"), output="It is a.txt<|im_end|>"
    )
    edited = Message("assistant", (Text("It is b.txt"),))
    echo = (user("list"), first.reply, tool_result(first.reply.tool_calls[0], "a.txt"), edited, user("sure?"))
    plan = world.plan(world.request(*echo))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.HISTORY_EDITED
    assert plan.break_.message_index == 3
    assert plan.parent is first
    assert plan.shared == len(first.context_ids())
    assert len(second.prompt_ids) > plan.shared


def test_an_identical_request_is_a_sibling_with_the_same_prompt(world: Any) -> None:
    first = world.call(user("list"), output=TURN)
    messages = (user("list"), first.reply, tool_result(first.reply.tool_calls[0], "a"))
    second = world.call(*messages, output="one<|im_end|>")
    plan = world.plan(world.request(*messages))
    assert plan.parent is first
    assert plan.break_ is None
    np.testing.assert_array_equal(plan.prompt_ids, second.prompt_ids)


def test_changed_tools_are_named(world: Any) -> None:
    first = world.call(user("list"), output="ok<|im_end|>")
    other = (Tool("other", "Another.", {"type": "object", "properties": {}}),)
    plan = world.plan(world.request(user("list"), first.reply, user("more"), tools=other))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.TOOLS_CHANGED


def test_tools_that_are_equal_in_python_only_are_changed(world: Any) -> None:
    """`True == 1` in Python; the model is shown another schema."""
    one, true = ((Tool("act", "", {"type": "object", "default": default}),) for default in (1, True))
    world.tools, asked, new = one, user("list"), user("more")
    first = world.call(asked, output="ok<|im_end|>")
    plan = world.plan(world.request(asked, first.reply, new, tools=true))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.TOOLS_CHANGED


def test_changed_system_text_is_named(world: Any) -> None:
    first = world.call(Message("system", (Text("a"),)), user("list"), output="ok<|im_end|>")
    plan = world.plan(world.request(Message("system", (Text("b"),)), user("list"), first.reply, user("more")))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.SYSTEM_CHANGED


def test_another_conversation_is_named(world: Any) -> None:
    world.call(user("list"), output="ok<|im_end|>")
    plan = world.plan(world.request(user("a quite different matter")))
    assert plan.parent is None
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.NEW_CONVERSATION


def test_a_summary_that_returns_is_a_compaction(world: Any) -> None:
    summary = "The user wanted a listing of the folder, and it held a.txt."
    first = world.call(user("list"), output="ok<|im_end|>")
    world.call(user("list"), first.reply, user("sum it up"), output=summary + "<|im_end|>")
    plan = world.plan(world.request(user("So far: " + summary), user("go on")))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.COMPACTION


def test_thinking_stays_within_a_tool_cycle_and_follows_the_template_after_it(world: Any) -> None:
    first = world.call(user("list"), output="<think>\nhm\n</think>\n\n" + TURN)
    assert first.reply.reasoning == "hm"
    dropped = msgspec.structs.replace(first.reply, parts=())
    plan = world.plan(world.request(user("list"), dropped, tool_result(first.reply.tool_calls[0], "a")))
    assert extends(plan, first)
    plan = world.plan(world.request(user("list"), dropped, user("never mind")))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.THINKING_DROPPED
    world.continuation.history = "keep"
    plan = world.plan(world.request(user("list"), dropped, user("never mind")))
    assert extends(plan, first)


@pytest.mark.parametrize("history", ["tool_cycle", "keep"])
@pytest.mark.parametrize("echoed", [True, False])
def test_thinking_in_history_is_as_the_policy_says_and_the_record_shows_it(
    world: Any, history: Any, echoed: bool
) -> None:
    """Whether or not the harness sends the thinking back."""
    world.continuation.history = history
    first = world.call(user("list"), output="<think>\nponder\n</think>\n\n" + TURN)
    turn = first.reply if echoed else msgspec.structs.replace(first.reply, parts=())
    cycle = (user("list"), turn, tool_result(first.reply.tool_calls[0], "a"))
    second = world.call(*cycle, output="a<|im_end|>")
    assert extends(world.planned, first)
    plan = world.plan(world.request(*cycle, second.reply, user("and then?")))
    kept = "ponder" in world.tokenizer.decode(plan.prompt_ids.tolist())
    assert kept == (history == "keep")
    assert extends(plan, second) == (history == "keep")
    if history != "keep":
        assert plan.break_ is not None
        assert plan.break_.reason is BreakReason.THINKING_DROPPED
        assert plan.break_.token_index == plan.shared < len(first.context_ids())


def test_changed_thinking_is_an_edit(world: Any) -> None:
    first = world.call(user("list"), output="<think>\nhm\n</think>\n\n" + TURN)
    changed = Message("assistant", (Reasoning("something else"),), first.reply.tool_calls)
    plan = world.plan(world.request(user("list"), changed, tool_result(first.reply.tool_calls[0], "a")))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.HISTORY_EDITED


def test_an_unfinished_parent_is_named(world: Any) -> None:
    world.call(user("list"), output="half", outcome=Outcome.ABORTED)
    plan = world.plan(world.request(user("list"), Message("assistant", (Text("half"),)), user("go on")))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.PARENT_UNFINISHED


def test_a_truncated_turn_is_closed_and_extended(world: Any) -> None:
    first = world.call(user("list"), output="it was a long")
    plan = world.plan(world.request(user("list"), first.reply, user("go on")))
    assert extends(plan, first)
    text = world.tokenizer.decode(plan.prompt_ids[len(first.context_ids()) :].tolist())
    assert text.startswith("<|im_end|>\n<|im_start|>user\ngo on")


@pytest.mark.parametrize("output", ["<think><|im_end|>", "<think>\nI wonder<|im_end|>"])
def test_a_turn_that_ends_while_it_thinks_is_extended(world: Any, output: str) -> None:
    world.continuation.history = "keep"
    first = world.call(user("list"), output=output)
    plan = world.plan(world.request(user("list"), first.reply, user("go on")))
    assert extends(plan, first)
    text = world.tokenizer.decode(plan.prompt_ids[len(first.context_ids()) :].tolist())
    assert text == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_that_a_user_types_end_no_turn(world: Any) -> None:
    typed = "a <|im_end|> b <tool_call>"
    plan = world.plan(world.request(user(typed)))
    ids = plan.prompt_ids.tolist()
    end = world.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert typed in world.tokenizer.decode(ids)
    without = world.plan(world.request(user("a b"))).prompt_ids.tolist()
    assert ids.count(end) == without.count(end)


def test_equal_replies_with_other_tokens_need_a_handle(world: Any) -> None:
    plain, spaced = '{"name": "bash", "arguments": {}}', '{"name":"bash","arguments":{}}'
    make = "<tool_call>\n{}\n</tool_call><|im_end|>".format
    one = world.call(user("list"), output=make(plain))
    two = world.call(user("list"), output=make(spaced))
    nameless = Message("assistant", (), (ToolCall("x", "bash", "{}"),))
    plan = world.plan(world.request(user("list"), nameless, Message("tool", (Text("a"),), tool_call_id="x")))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.AMBIGUOUS_PARENT
    for node in (one, two):
        plan = world.plan(world.request(user("list"), node.reply, tool_result(node.reply.tool_calls[0], "a")))
        assert plan.parent is node
        assert extends(plan, node)


def test_a_sibling_of_a_named_reply_has_that_replys_tokens(world: Any) -> None:
    make = "<tool_call>\n{}\n</tool_call><|im_end|>".format
    for arguments in ('{"name": "bash", "arguments": {}}', '{"name":"bash","arguments":{}}'):
        node = world.call(user("list"), output=make(arguments))
        again = (user("list"), node.reply, tool_result(node.reply.tool_calls[0], "a"))
        assert world.call(*again, output="ok<|im_end|>").parent is node


def test_a_sibling_that_does_not_think_has_a_prompt_of_its_own(world: Any) -> None:
    asked = world.request(user("list"))
    unthinking = run_steps(world.continuation.steps("one", world.forest, asked, thinking=False)).prompt_ids
    thinking = world.call(user("list"), output="ok<|im_end|>").prompt_ids
    assert unthinking.tolist() != thinking.tolist()
    plan = run_steps(world.continuation.steps("two", world.forest, asked, thinking=False))
    assert plan.prompt_ids.tolist() == unthinking.tolist()
    assert plan.parent is None
    assert plan.break_ is None


def test_a_sibling_stands_behind_the_same_break(world: Any) -> None:
    first = world.call(user("list"), output="<think>\nhm\n</think>\n\nok<|im_end|>")
    for _ in range(2):
        world.call(user("list"), first.reply, user("more"), output="ok<|im_end|>")
        assert world.planned.break_.reason is BreakReason.THINKING_DROPPED
        assert world.planned.break_.message_index == 2
    for _ in range(2):
        world.call(user("a side matter"), output="ok<|im_end|>")
        assert world.planned.break_.reason is BreakReason.NEW_CONVERSATION


def test_a_template_that_keeps_thinking_is_followed_by_going_on(tmp_path: Path) -> None:
    """Whether or not the harness sends the thinking back."""
    world = World(TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen3_training"))))
    first = world.call(user("list"), output="<think>\nhm\n</think>\n\nok<|im_end|>")
    assert first.reply is not None
    for turn in (first.reply, msgspec.structs.replace(first.reply, parts=first.reply.parts[1:])):
        assert extends(world.plan(world.request(user("list"), turn, user("b"))), first)
    assert drops_thinking(FamilyRenderer("qwen3", world.tokenizer))


def test_thinking_is_dropped_once(world: Any) -> None:
    first = world.call(user("list"), output="<think>\nhm\n</think>\n\nok<|im_end|>")
    second = world.call(user("list"), first.reply, user("b"), output="fine<|im_end|>")
    assert second.break_.reason is BreakReason.THINKING_DROPPED
    assert extends(world.plan(world.request(user("list"), first.reply, user("b"), second.reply, user("c"))), second)


def test_no_arguments_are_an_empty_object(world: Any) -> None:
    first = world.call(user("list"), output='<tool_call>\n{"name": "bash", "arguments": {}}\n</tool_call><|im_end|>')
    echo = Message("assistant", (), (ToolCall("other-id", "bash", ""),))
    assert extends(world.plan(world.request(user("list"), echo, tool_result(echo.tool_calls[0], "a"))), first)


def test_a_prompt_stays_whole_while_a_child_takes_over(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread encodes for one call while the event loop adds another to the forest."""
    first = world.call(user("list"), output="ok<|im_end|>")
    second = world.call(user("list"), first.reply, user("b"), output="fine<|im_end|>")
    whole = second.prompt_ids.tolist()
    slot = CallNode.__dict__["_prompt"]

    def read(node: CallNode) -> Any:
        held = slot.__get__(node)
        if node is second and len(held) == node.prompt_length:
            slot.__set__(node, held[node.shared :])
        return held

    monkeypatch.setattr(CallNode, "_prompt", property(read, slot.__set__))
    assert second.prompt_ids.tolist() == whole
    assert second.prompt_ids.tolist() == whole


def test_text_that_the_policy_ignores_breaks_nothing(world: Any) -> None:
    def told(time: str, text: str = "Be brief.") -> Message:
        return Message("system", (Text(f"{text} Now: {time}"),))

    world.forest = Forest(DigestCache({"policy": (re.compile("Now: [0-9:]+"), re.compile("never there"))}))
    first = world.call(told("12:00"), user("list"), output="ok<|im_end|>")
    assert extends(world.plan(world.request(told("12:01"), user("list"), first.reply, user("more"))), first)
    plan = world.plan(world.request(told("12:01", "Be long."), user("list"), first.reply, user("more")))
    assert plan.break_.reason is BreakReason.SYSTEM_CHANGED


def test_a_history_whose_first_message_was_edited_is_the_same_conversation(world: Any) -> None:
    first = world.call(user("list. Now: 12:00"), output=TURN)
    call = first.reply.tool_calls[0]
    plan = world.plan(world.request(user("list. Now: 12:01"), first.reply, tool_result(call, "a.txt")))
    assert (plan.break_.reason, plan.parent) == (BreakReason.HISTORY_EDITED, first)
    assert np.array_equal(plan.prompt_ids[: plan.shared], first.prompt_ids[: plan.shared])


def test_results_that_answer_other_calls_are_an_edit(tmp_path: Path) -> None:
    """A template may write which call a result answers, so equal texts in equal places are not enough."""
    opening = "{{- '\\n<tool_response>\\n' }}"
    template = trl_template("qwen3").replace(opening, "{{- '\\n<tool_response>\\n' + message.name + ': ' }}")
    look, sh = (Tool(name, "", {"type": "object"}) for name in ("look", "sh"))
    world = World(TemplateRenderer(tokenizer_with(tmp_path, template)), tools=(look, sh))
    block = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'.format
    turn = world.call(user("go"), output=f"{block('look')}\n{block('sh')}<|im_end|>").reply
    assert turn is not None

    def history(*answers: int) -> tuple[Message, ...]:
        first, second = (turn.tool_calls[at] for at in answers)
        messages = [user("go"), turn, tool_result(first, "xx"), tool_result(second, "yy")]
        return Linker(CacheSpace()).link(messages, "messages[{}]".format)

    def added(plan: Any) -> str:
        text = world.tokenizer.decode(plan.prompt_ids[plan.shared :].tolist())
        return " ".join(re.findall(r"\w+: \w+", text))

    straight = world.call(*history(0, 1), output="Done.<|im_end|>")
    assert straight.reply is not None
    assert added(world.plan(world.request(*history(0, 1)))) == "look: xx sh: yy"
    swapped = world.plan(world.request(*history(1, 0)))
    assert swapped.break_ is None
    assert added(swapped) == "look: yy sh: xx"
    assert extends(world.plan(world.request(*history(0, 1), straight.reply, user("so?"))), straight)
    edited = world.plan(world.request(*history(1, 0), straight.reply, user("so?")))
    assert edited.break_ is not None
    assert edited.break_.reason is BreakReason.HISTORY_EDITED
