"""A small world for continuation: a real tokenizer, a session's forest, and an engine that samples what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import pytest

from rolltap.engine.tiny import FOLDER
from rolltap.ids import new_id
from rolltap.protocols.conversation import ChatRequest, Message, Sampling, Tool
from rolltap.protocols.handles import Handles
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.canonical import DigestCache
from rolltap.proxy.continuation.fit import find_fitting
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.plan import Continuation, PromptPlan
from rolltap.proxy.continuation.rendering import FamilyRenderer, HistoryThinking, TokenRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.tokenizer import HubTokenizer
from rolltap.types import Outcome

from .planning import run_steps

fitting_of = lru_cache(find_fitting)
"""The audit's result for a renderer. Some tests make thousands of worlds."""

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})


@dataclass
class World:
    """One session of one policy."""

    renderer: TokenRenderer
    history: HistoryThinking = "tool_cycle"
    tools: tuple[Tool, ...] = (BASH,)
    effort: str = ""
    forest: Forest = field(default_factory=lambda: Forest(DigestCache()))
    handles: Handles = field(default_factory=lambda: Handles(b"0123456789abcdef"))

    def __post_init__(self) -> None:
        self.continuation = Continuation("policy", self.renderer, self.handles, self.history, fitting_of(self.renderer))

    @property
    def tokenizer(self) -> HubTokenizer:
        return self.renderer.tokenizer

    def request(self, *messages: Message, tools: tuple[Tool, ...] | None = None) -> ChatRequest:
        items = tuple(repr(message).encode() for message in messages)
        chosen = self.tools if tools is None else tools
        return ChatRequest("test", "policy", messages, chosen, sampling=Sampling(), items=items)

    def plan(self, request: ChatRequest) -> PromptPlan:
        self._next = new_id()
        steps = self.continuation.steps(self._next, self.forest, request, thinking=True, effort=self.effort)
        self.planned = run_steps(steps)
        return self.planned

    def call(self, *messages: Message, output: str | list[int], outcome: Outcome = Outcome.COMPLETED) -> CallNode:
        """Plans a call, lets the engine sample `output`, and takes it into the forest."""
        plan = self.plan(self.request(*messages))
        node = plan.node(self._next)
        self.forest.add(node)
        ids = self.tokenizer.encode(output) if isinstance(output, str) else output
        call_id = node.call_id
        parser = ReplyParser(
            self.renderer, plan.prompt_ids.tolist(), self.tools, (), lambda at: self.handles.mint(call_id, at)
        )
        parser.feed(ids)
        _, choice = parser.finish("stop")
        self.forest.complete(node, np.asarray(ids, np.int32), choice.message, outcome)
        return node


@pytest.fixture(scope="session")
def tokenizer() -> HubTokenizer:
    return HubTokenizer(FOLDER)


@pytest.fixture(scope="session")
def family(tokenizer: HubTokenizer) -> FamilyRenderer:
    return FamilyRenderer("qwen3", tokenizer)


@pytest.fixture(scope="session")
def template(tokenizer: HubTokenizer) -> TemplateRenderer:
    return TemplateRenderer(tokenizer)


@pytest.fixture(params=["family", "template"])
def either(request: pytest.FixtureRequest, family: FamilyRenderer, template: TemplateRenderer) -> TokenRenderer:
    return family if request.param == "family" else template


@pytest.fixture
def world(either: TokenRenderer) -> World:
    return World(either)
