"""Whatever is sampled and however a harness rewrites its history: the plan is the record's tokens, or says why not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.protocols.conversation import Message, Text, ToolCall
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.rendering import TokenRenderer

from .conftest import World

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

CALL = '<tool_call>\n{"name": %s, "arguments": %s}\n</tool_call>'
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@dataclass
class Sampled:
    """What an engine samples in one turn: texts to be split into tokens at odd places, and plain ids."""

    pieces: list[str | list[int]]
    stops: bool

    def ids(self, renderer: TokenRenderer) -> list[int]:
        tokenizer = renderer.tokenizer
        ids = [
            token
            for piece in self.pieces
            for token in (tokenizer.encode(piece) if isinstance(piece, str) else piece)
            if token not in renderer.stop_token_ids  # where the engine would have stopped
        ]
        return [*ids, renderer.stop_token_ids[0]] if self.stops else ids


@st.composite
def sampled(draw: st.DrawFn) -> Sampled:
    """Text cut anywhere (so that no tokenizer would give its ids), any ids at all, thinking, and calls spelt oddly."""
    pieces: list[str | list[int]] = []
    if draw(st.booleans()):
        pieces += ["<think>", *draw(st.lists(st.text(max_size=8), max_size=3)), "</think>"]
    pieces += draw(st.lists(st.text(max_size=6) | st.lists(st.integers(0, 879), max_size=6), max_size=5))
    for _ in range(draw(st.integers(0, 2))):
        arguments = draw(st.dictionaries(st.text(max_size=6), JSON, max_size=3))
        spelt = json.dumps(
            arguments,
            indent=draw(st.sampled_from([None, 1])),
            ensure_ascii=draw(st.booleans()),
            separators=draw(st.sampled_from([(",", ":"), (" , ", ": ")])),
        )
        block = CALL % (json.dumps("bash"), spelt)
        at = draw(st.integers(0, len(block)))
        pieces += [block[:at], block[at:]]
    return Sampled(pieces, stops=draw(st.booleans()))


@st.composite
def echoed(draw: st.DrawFn, reply: Message) -> Message:
    """The reply as a harness may lawfully send it back."""
    calls = []
    for call in reply.tool_calls:
        arguments = call.arguments
        if draw(st.booleans()):
            value = json.loads(arguments)
            arguments = json.dumps(value, sort_keys=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])))
        calls.append(ToolCall(draw(st.sampled_from([call.id, "toolu_1"])), call.name, arguments))
    text = draw(st.sampled_from([reply.text, reply.text.strip(), f"\n{reply.text} "]))
    cut = draw(st.integers(0, len(text)))
    parts = tuple(Text(piece) for piece in (text[:cut], text[cut:]) if piece)
    kept = tuple(part for part in reply.parts if not isinstance(part, Text)) if draw(st.booleans()) else ()
    return Message("assistant", (*kept, *parts), tuple(calls))


def answers(draw: Any, reply: Message) -> tuple[Message, ...]:
    """Results for the reply's calls, or a user's words."""
    if reply.tool_calls:
        return tuple(
            Message("tool", (Text(draw(st.text(max_size=8))),), tool_call_id=call.id) for call in reply.tool_calls
        )
    return (Message("user", (Text(draw(st.text(max_size=8))),)),)


@dataclass
class Chat:
    """A conversation under way: its history as resent, its calls, and the prompts that the engine really saw."""

    world: World
    history: list[Message]
    nodes: list[CallNode] = field(default_factory=list)
    prompts: list[np.ndarray] = field(default_factory=list)

    def turn(self, output: Sampled) -> Message:
        node = self.world.call(*self.history, output=output.ids(self.world.renderer))
        self.nodes.append(node)
        self.prompts.append(node.prompt_ids)
        assert node.reply is not None
        return node.reply


def start(world: World) -> Chat:
    fresh = World(world.renderer, "keep")
    return Chat(fresh, [Message("system", (Text("You help."),)), Message("user", (Text("go"),))])


@PROPERTY
@given(data=st.data())
def test_a_lawful_echo_is_always_continued(world: World, data: st.DataObject) -> None:
    chat = start(world)
    for _ in range(data.draw(st.integers(2, 4))):
        reply = chat.turn(data.draw(sampled()))
        chat.history += [data.draw(echoed(reply)), *answers(data.draw, reply)]
    plan = chat.world.plan(chat.world.request(*chat.history))
    assert plan.break_ is None, plan.break_
    for before, prompt in zip(chat.nodes, [*chat.prompts[1:], plan.prompt_ids], strict=True):
        context = before.context_ids()
        np.testing.assert_array_equal(prompt[: len(context)], context)
    for node, prompt in zip(chat.nodes, chat.prompts, strict=True):
        np.testing.assert_array_equal(node.prompt_ids, prompt)  # also where a child holds most of it


def rewrite(draw: Any, history: list[Message]) -> list[Message]:
    """Any change at all to a history, or none."""
    at = draw(st.integers(0, len(history) - 1))
    words = Message(draw(st.sampled_from(["user", "assistant", "system"])), (Text(draw(st.text(max_size=8))),))
    kind = draw(st.sampled_from(["same", "drop", "cut", "insert", "replace", "repeat", "swap", "edit"]))
    head, one, tail = history[:at], history[at], history[at + 1 :]
    if kind == "swap" and tail:
        return [*head, tail[0], one, *tail[1:]]
    edited = msgspec.structs.replace(one, parts=(*one.parts, Text(draw(st.text(max_size=4)))))
    changed = {
        "drop": [*head, *tail],
        "cut": [*head, one],
        "insert": [*head, words, one, *tail],
        "replace": [*head, words, *tail],
        "repeat": [*head, one, one, *tail],
        "edit": [*head, edited, *tail],
    }
    return changed.get(kind, history) or history


@PROPERTY
@given(data=st.data())
def test_any_rewrite_is_continued_exactly_or_named(world: World, data: st.DataObject) -> None:
    chat = start(world)
    for _ in range(data.draw(st.integers(1, 3))):
        reply = chat.turn(data.draw(sampled()))
        chat.history += [data.draw(echoed(reply)), *answers(data.draw, reply)]
    for _ in range(3):
        changed = chat.history
        for _ in range(data.draw(st.integers(1, 3))):
            changed = rewrite(data.draw, changed)
        node = chat.world.call(*changed, output=data.draw(sampled()).ids(chat.world.renderer))
        break_ = chat.world.planned.break_
        context = node.parent.context_ids() if node.parent is not None else np.empty(0, np.int32)
        common = min(len(context), len(node.prompt_ids))
        differs = np.flatnonzero(node.prompt_ids[:common] != context[:common])
        assert node.shared == (differs[0] if len(differs) else common)
        if break_ is None:
            assert node.shared == len(context)
        else:
            assert break_.token_index == node.shared
            assert break_.parent_id == (node.parent.call_id if node.parent else None)


@pytest.mark.parametrize("turns", [300])
def test_a_deep_chain_holds_every_token_once(world: World, turns: int) -> None:
    chat = start(world)
    for turn in range(turns):
        reply = chat.turn(Sampled([CALL % ('"bash"', f'{{"command":  "sed -n {turn}p x"}}')], stops=True))
        (call,) = reply.tool_calls
        chat.history += [reply, Message("tool", (Text(f"line {turn}"),), tool_call_id=call.id)]
    assert sum(node.stored_ids for node in chat.nodes) <= 2 * chat.nodes[-1].context_length
    for node, prompt in zip(chat.nodes, chat.prompts, strict=True):
        np.testing.assert_array_equal(node.prompt_ids, prompt)
