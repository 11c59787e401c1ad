"""Conversations of every shape fit every family's template: nothing refused, nothing lost, every turn bridged."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import pytest

from rolltap.engine.scripted import ScriptedReply, ToolUse
from rolltap.ids import new_id
from rolltap.protocols.conversation import ChatRequest, Message, Role, Text, Tool, ToolCall
from rolltap.protocols.handles import Handles
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.plan import Continuation, PromptPlan
from rolltap.proxy.continuation.rendering import TokenRenderer
from rolltap.types import BreakReason, Outcome

from ..unit.continuation.conftest import fitting_of
from ..unit.continuation.planning import run_steps
from .families import FAMILIES, TRAINING, Family
from .fitting_table import cells, documented_rows, renderer_of
from .writing import FamilyReplyWriter

TOOLS = (Tool("look", "Looks.", {"type": "object", "properties": {"name": {"type": "string"}}}),)
HANDLES = Handles(b"0123456789abcdef")
HANDLE = HANDLES.mint(new_id())[:7]
SESSIONS, MANY_SESSIONS = 5, 40
"""Generated sessions a family, in `make test` and in `make test-families`; each has up to eight calls."""


UNBRIDGED = {
    "deepseekv3 (template)": "it writes the beginning of a turn's results once in a conversation",
    "gptoss (template)": "it writes a turn otherwise when another follows",
    "mistral_v3 (template)": "it writes the tools before the last user message",
}
"""Templates whose new messages depend on the history: such a call is rendered anew, with a break."""

QUICK = [name for name in FAMILIES if TRAINING not in name]


@cache
def documented() -> dict[str, str]:
    return {name: row for names, row in documented_rows() for name in names}


@lru_cache(maxsize=1)
def continuation_of(renderer: TokenRenderer) -> Continuation:
    return Continuation("policy", renderer, HANDLES, "keep", fitting_of(renderer))


@pytest.mark.parametrize("name", FAMILIES, scope="module")
def test_every_shape_fits_as_the_table_says(name: str) -> None:
    fitting = fitting_of(renderer_of(FAMILIES[name]))
    assert {result.shape: result.problem for result in fitting.table if result.problem} == {}
    if name in QUICK:
        assert documented()[name] == cells(fitting), "python -m tests.families.fitting_table writes it"


def test_the_table_has_each_family_once() -> None:
    names = [name for names, _ in documented_rows() for name in names]
    assert sorted(names) == sorted(QUICK)
    assert len({cells for _, cells in documented_rows()}) == len(documented_rows())


@dataclass
class GeneratedSession:
    """A session with any messages in any order that the protocols allow. Every text is a word of its own."""

    family: Family
    renderer: TokenRenderer
    writer: FamilyReplyWriter
    random: random.Random
    messages: list[Message] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.continuation = continuation_of(self.renderer)
        self.forest = Forest(DigestCache())

    def word(self) -> str:
        self.count += 1
        return "w" + "".join("bcdfghjkmn"[int(digit)] for digit in f"{self.count:03}") + "w"

    def text(self, *roles: Role) -> Message:
        return Message(self.random.choice(roles), (Text(self.word()),))

    def begin(self) -> None:
        """System messages, a user's, and perhaps a history that was not sampled here."""
        self.messages += [self.text("system", "developer") for _ in range(self.random.choice((0, 1, 1, 2, 3)))]
        if self.random.random() < 0.3:
            self.messages.append(self.text("assistant"))
        self.messages += [self.text("user", "user", "developer") for _ in range(self.random.choice((1, 1, 2)))]
        if self.random.random() < 0.4:
            call = ToolCall(f"toolu_{self.word()}", "look", json.dumps({"name": self.word()}))
            self.messages.append(Message("assistant", (Text(self.word()),), (call,)))
            self.messages += self.answered([call])
        if self.messages[-1].role == "assistant" or self.random.random() < 0.2:
            self.messages.append(self.text("user"))

    def answered(self, calls: list[ToolCall]) -> list[Message]:
        """Results, in order or not, with other messages before, between and behind them."""
        results = [self.result_of(call, self.word()) for call in calls]
        others = [self.text("user", "system", "developer") for _ in range(self.random.choice((0, 0, 1, 2)))]
        if not results and not others:
            others = [self.text("user", "system")]
        new = [*results, *others]
        if self.random.random() < 0.3:
            self.random.shuffle(new)
        return new

    def result_of(self, call: ToolCall, text: str) -> Message:
        return Message("tool", (Text(text),), tool_call_id=call.id, name=call.name)

    def call(self, scripted: ScriptedReply | None = None) -> tuple[PromptPlan, Message]:
        """One call of the session: its plan, and the sampled reply."""
        items = tuple(repr(message).encode() for message in self.messages)
        request = ChatRequest("test", "policy", tuple(self.messages), TOOLS, items=items)
        call_id = new_id()
        plan = run_steps(self.continuation.steps(call_id, self.forest, request, thinking=True))
        node = plan.node(call_id)
        self.forest.add(node)
        prompt = plan.prompt_ids.tolist()
        ids = self.writer.write(scripted or self.reply(), prompt)
        parser = ReplyParser(self.renderer, prompt, TOOLS, (), lambda at: HANDLES.mint(call_id, at))
        parser.feed(ids)
        _, choice = parser.finish("stop")
        self.forest.complete(node, np.asarray(ids, np.int32), choice.message, Outcome.COMPLETED)
        return plan, choice.message

    def reply(self) -> ScriptedReply:
        number = self.random.choice((0, 1, 1, 2)) if self.family.tools and self.family.reads else 0
        calls = [
            ToolUse("look", {"name": self.word()}) for _ in range(number if self.family.parallel else min(number, 1))
        ]
        return ScriptedReply(
            say="" if calls and self.random.random() < 0.5 else self.word(), call=tuple(calls), split="odd"
        )


@pytest.mark.parametrize("name", QUICK, scope="module")
@pytest.mark.parametrize(
    "seeds", [range(SESSIONS), pytest.param(range(SESSIONS, MANY_SESSIONS), marks=pytest.mark.families)], ids=str
)
def test_generated_sessions_fit_and_are_bridged(name: str, seeds: range) -> None:
    family = FAMILIES[name]
    renderer = renderer_of(family)
    writer = FamilyReplyWriter(family, Path(renderer.tokenizer.name_or_path))
    for seed in seeds:
        session = GeneratedSession(family, renderer, writer, random.Random(f"{name} {seed}"))
        session.begin()
        context: list[int] = []
        for turn in range(session.random.randrange(2, 9)):
            where = f"session {seed}, call {turn}"
            plan, reply = session.call()
            prompt = plan.prompt_ids.tolist()
            if prompt[: len(context)] != context:
                assert name in UNBRIDGED, f"{where}: not bridged, {plan.break_}"
                assert plan.break_ is not None
                assert plan.break_.reason is BreakReason.TEMPLATE_NOT_BRIDGEABLE
            text = renderer.tokenizer.decode(prompt)
            assert HANDLE not in text, f"{where}: the prompt shows a handle of ours"
            lost = [message for message in session.messages if message.text not in text and message.role != "assistant"]
            assert not lost, f"{where}: {lost[0].role} message is not in the prompt"
            node = session.forest.nodes[next(reversed(session.forest.nodes))]
            context = node.context_ids().tolist()
            session.messages += [reply, *session.answered(list(reply.tool_calls))]


KIMI = [name for name in QUICK if name.startswith("kimi")]


@pytest.mark.parametrize("name", KIMI)
def test_a_prompt_has_the_ids_that_the_model_sampled(name: str) -> None:
    """Kimi takes a tool's name from its id: in a bridge, in a whole rendering after a break, of foreign calls."""
    renderer = renderer_of(FAMILIES[name])
    writer = FamilyReplyWriter(FAMILIES[name], Path(renderer.tokenizer.name_or_path))
    session = GeneratedSession(FAMILIES[name], renderer, writer, random.Random(3))
    foreign = ToolCall("toolu_017", "look", '{"name": "x"}')
    first = [Message("user", (Text("go"),)), Message("assistant", (), (foreign,)), session.result_of(foreign, "old")]
    session.messages = [Message("system", (Text("before"),)), *first]
    _, reply = session.call(ScriptedReply(call=(ToolUse("look", {"name": "a"}), ToolUse("look", {"name": "b"}))))
    assert [call.given_id for call in reply.tool_calls] == ["functions.look:1", "functions.look:2"]
    session.messages += [reply, *(session.result_of(call, "new") for call in reply.tool_calls)]
    bridged, _ = session.call(ScriptedReply(say="done"))
    session.messages[0] = Message("system", (Text("after"),))
    whole, _ = session.call(ScriptedReply(say="done"))
    assert bridged.break_ is None
    assert whole.break_ is not None
    texts = [session.renderer.tokenizer.decode(plan.prompt_ids.tolist()) for plan in (bridged, whole)]
    assert texts[0].replace("before", "after") == texts[1]
    for number in range(3):
        assert texts[1].count(f"functions.look:{number}") == 2  # the call and the result


def test_a_custom_tools_text_is_the_argument_that_its_template_declares() -> None:
    renderer = renderer_of(FAMILIES["qwen3"])
    call = ToolCall("c1", "patch", '{"this": "is no JSON of ours"}', "custom")
    messages = [Message("user", (Text("go"),)), Message("assistant", (), (call,))]
    text = renderer.tokenizer.decode(renderer.render(messages, (), thinking=True))
    assert json.dumps({"input": call.arguments}) in text
