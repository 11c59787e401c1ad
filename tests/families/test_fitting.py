"""Conversations of every shape fit every family's template: nothing refused, nothing lost, every turn bridged."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from rolltap.engine.scripted import ScriptedReply, ToolUse
from rolltap.ids import new_id
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.fit import find_fitting
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.handles import Handles
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.plan import Continuation, PromptPlan
from rolltap.proxy.continuation.rendering import FamilyRenderer, TokenRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.proxy.continuation.tokenizer import HubTokenizer
from rolltap.proxy.conversation.chat import ChatRequest, Message, Role, Text, Tool, ToolCall
from rolltap.types import Outcome

from ..unit.continuation.planning import run_steps
from .families import FAMILIES, TRAINING, Family
from .vocabularies import harmony_folder, model_folder
from .writing import FamilyReplyWriter

TOOLS = (Tool("look", "Looks.", {"type": "object", "properties": {"name": {"type": "string"}}}),)
HANDLES = Handles(b"0123456789abcdef")
SESSIONS = 12
"""Generated sessions a family; each has up to eight calls."""

QUICK = [name for name in FAMILIES if TRAINING not in name]


def renderer_of(family: Family) -> TokenRenderer:
    if family.renderer == "gpt-oss":
        os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(harmony_folder())
    tokenizer = HubTokenizer(model_folder(family, "" if family.renderer == "gpt-oss" else "tiny"))
    return FamilyRenderer(family.renderer, tokenizer) if family.renderer else TemplateRenderer(tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_shape_fits(name: str) -> None:
    fitting = find_fitting(renderer_of(FAMILIES[name]))
    assert {result.shape: result.problem for result in fitting.table if result.problem} == {}


@dataclass
class GeneratedSession:
    """A session with any messages in any order that the protocols allow. Every text is a word of its own."""

    family: Family
    renderer: TokenRenderer
    random: random.Random
    messages: list[Message] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self.continuation = Continuation("policy", self.renderer, HANDLES, "keep")
        self.forest = Forest(DigestCache())
        self.writer = FamilyReplyWriter(self.family, Path(self.renderer.tokenizer.name_or_path))

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
        results = [Message("tool", (Text(self.word()),), tool_call_id=call.id, name=call.name) for call in calls]
        others = [self.text("user", "system", "developer") for _ in range(self.random.choice((0, 0, 1, 2)))]
        if not results and not others:
            others = [self.text("user", "system")]
        new = [*results, *others]
        if self.random.random() < 0.3:
            self.random.shuffle(new)
        return new

    def call(self) -> tuple[PromptPlan, Message]:
        """One call of the session: its plan, and the sampled reply."""
        items = tuple(repr(message).encode() for message in self.messages)
        request = ChatRequest("test", "policy", tuple(self.messages), TOOLS, items=items)
        call_id = new_id()
        plan = run_steps(self.continuation.steps(call_id, self.forest, request, thinking=True))
        node = plan.node(call_id)
        self.forest.add(node)
        prompt = plan.prompt_ids.tolist()
        ids = self.writer.write(self.reply(), prompt)
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


@pytest.mark.parametrize("name", QUICK)
def test_generated_sessions_fit_and_are_bridged(name: str) -> None:
    family = FAMILIES[name]
    renderer = renderer_of(family)
    for seed in range(SESSIONS):
        session = GeneratedSession(family, renderer, random.Random(f"{name} {seed}"))
        session.begin()
        context: list[int] = []
        for turn in range(session.random.randrange(2, 9)):
            where = f"session {seed}, call {turn}"
            plan, reply = session.call()
            prompt = plan.prompt_ids.tolist()
            assert prompt[: len(context)] == context, f"{where}: not bridged, {plan.break_}"
            text = renderer.tokenizer.decode(prompt)
            lost = [message for message in session.messages if message.text not in text and message.role != "assistant"]
            assert not lost, f"{where}: {lost[0].role} message is not in the prompt"
            node = session.forest.nodes[next(reversed(session.forest.nodes))]
            context = node.context_ids().tolist()
            session.messages += [reply, *session.answered(list(reply.tool_calls))]
