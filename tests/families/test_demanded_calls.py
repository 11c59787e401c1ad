"""A call that the client demands: the prompt ends with its beginning, the model samples the rest, the chain goes on."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rolltap.engine.scripted import ScriptedReply, ToolUse
from rolltap.ids import new_id
from rolltap.protocols.conversation import ChatRequest, Message, Text, ToolCallDelta
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.plan import PromptPlan
from rolltap.types import Outcome

from ..unit.continuation.planning import run_steps
from .families import FAMILIES
from .fitting_table import renderer_of
from .test_fitting import HANDLES, QUICK, TOOLS, UNBRIDGED, continuation_of
from .vocabularies import model_folder
from .writing import FamilyReplyWriter

ALWAYS_THINK = {"deepseek-r1", "deepseekv3 (template)", "gpt-oss", "minimax-m2"}
"""Their prompts open thinking in any case, so nothing can be demanded of the first token."""
NO_READER = {"gptoss (template)", "muse_glimmer (template)"}
CALLING = [name for name in QUICK if FAMILIES[name].tools and name not in ALWAYS_THINK | NO_READER]


@pytest.mark.parametrize("name", CALLING, scope="module")
def test_a_demanded_call_is_sampled_from_its_arguments_on_and_continued(name: str) -> None:
    family = FAMILIES[name]
    renderer = renderer_of(family)
    continuation, writer, forest = (
        continuation_of(renderer),
        FamilyReplyWriter(family, model_folder(family, "tiny")),
        Forest(DigestCache()),
    )
    beginning = continuation.call_beginnings.find("look")
    messages = [Message("user", (Text("go"),))]

    def planned(*, demands: bool) -> tuple[str, PromptPlan]:
        call_id = new_id()
        request = ChatRequest("test", "policy", tuple(messages), TOOLS, items=tuple(map(_item, messages)))
        steps = continuation.steps(call_id, forest, request, thinking=False, beginning=beginning if demands else ())
        return call_id, run_steps(steps)

    _, free = planned(demands=False)
    call_id, plan = planned(demands=True)
    assert plan.prompt_ids.tolist() == [*free.prompt_ids.tolist(), *beginning]
    node = plan.node(call_id)
    forest.add(node)
    reply = writer.write(ScriptedReply(call=(ToolUse("look", {"name": "wbcw"}),)), free.prompt_ids.tolist())
    at = 0 if name == "devstral (template)" else _place(beginning, reply)  # Devstral's model makes ids of its own
    at += len(beginning)
    parser = ReplyParser(renderer, free.prompt_ids.tolist(), TOOLS, (), lambda at: HANDLES.mint(call_id, at))
    events = [event for token in [*beginning, *reply[at:]] for event in parser.feed([token])]
    last, choice = parser.finish("stop")
    (call,) = choice.message.tool_calls
    assert (call.name, json.loads(call.arguments), parser.unparsable) == ("look", {"name": "wbcw"}, False)
    assert "".join(event.arguments for event in [*events, *last] if isinstance(event, ToolCallDelta)) == call.arguments

    forest.complete(node, np.asarray(reply[at:], np.int32), choice.message, Outcome.COMPLETED)
    messages += [choice.message, Message("tool", (Text("found"),), tool_call_id=call.id, name="look")]
    _, after = planned(demands=False)
    if name not in UNBRIDGED:
        assert after.break_ is None
        assert after.prompt_ids[: node.context_length].tolist() == node.context_ids().tolist()


@pytest.mark.parametrize("name", sorted(ALWAYS_THINK | NO_READER))
def test_where_a_reply_begins_otherwise_no_call_can_be_begun(name: str) -> None:
    assert continuation_of(renderer_of(FAMILIES[name])).call_beginnings.find("look") == ()


def test_a_request_is_no_repetition_of_one_that_demanded_otherwise() -> None:
    """The same messages with another tool, or none, have another prompt."""
    continuation, forest = continuation_of(renderer_of(FAMILIES["qwen3"])), Forest(DigestCache())
    messages = (Message("user", (Text("go"),)),)
    prompts = []
    for beginning in [(), *map(continuation.call_beginnings.find, ("look", "walk", "look")), ()]:
        request = ChatRequest("test", "policy", messages, TOOLS, items=tuple(map(_item, messages)))
        plan = run_steps(continuation.steps(call_id := new_id(), forest, request, thinking=False, beginning=beginning))
        forest.add(plan.node(call_id))
        prompts.append(renderer_of(FAMILIES["qwen3"]).tokenizer.decode(plan.prompt_ids.tolist()))
    assert prompts[0] == prompts[4]
    assert prompts[1] == prompts[3] == prompts[2].replace('"walk"', '"look"')
    assert prompts[1].startswith(prompts[0])


def _item(message: Message) -> bytes:
    return repr(message).encode()


def _place(beginning: tuple[int, ...], reply: list[int]) -> int:
    """Where the model's own call has the same beginning. Kimi K2.5's closes its thinking before."""
    return next(at for at in range(3) if tuple(reply[at : at + len(beginning)]) == beginning)
