"""One reply spelled in another lawful way is the same reply; an edit in any spelling is an edit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.conversation import Message, Part, Reasoning, Text, ToolCall
from rolltap.protocols.history import Linker
from rolltap.proxy.continuation.call_node import CallNode
from rolltap.proxy.continuation.canonical import message_digest
from rolltap.proxy.continuation.turns import MAX_PIECES, TurnReader
from rolltap.types import BreakReason

from .conftest import World

PROPERTY = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

BLOCK = '<tool_call>\n{{"name": "bash", "arguments": {}}}\n</tool_call>'
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], exclude_characters="<>|"), max_size=12)
ARGUMENTS = st.sampled_from(
    [
        "{}",
        '{"n": 1.0}',
        '{"n": 1e3}',
        '{"n": -0, "m": 12345678901234567890123}',
        '{"command": "ls"}',
        '{"a": [1.5, 1E+2]}',
    ]
)
OTHER_NOTATIONS = {"1.0": "1", "1e3": "1000", "-0": "0", "1E+2": "100.0"}


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def spelled(thinking: str, text: str, blocks: Sequence[str], after: str) -> str:
    """What an engine samples: thinking, text, calls, and text after them."""
    thought = f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
    return thought + text + "\n".join(BLOCK.format(block) for block in blocks) + after + "<|im_end|>"


@st.composite
def outputs(draw: st.DrawFn) -> str:
    blocks = draw(st.lists(ARGUMENTS, max_size=3))
    text = draw(WORDS) if blocks else draw(WORDS.filter(str.strip))
    return spelled(draw(WORDS.map(str.strip)), text, blocks, draw(st.sampled_from(["", " And so."])) if blocks else "")


def renotated(draw: Any, call: ToolCall) -> ToolCall:
    """The call with its arguments in another notation; its id maybe lost."""
    text = call.arguments
    for number, other in OTHER_NOTATIONS.items():
        if draw(st.booleans()):
            text = text.replace(f": {number}", f": {other}").replace(f" {number}]", f" {other}]")
    if draw(st.booleans()):
        text = text.replace(": ", ":")
    return replace(call, arguments=text)


@st.composite
def respelled(draw: st.DrawFn, reply: Message, results: Sequence[Message]) -> list[Message]:
    """The reply and its results, in a lawful spelling."""
    calls = [renotated(draw, call) for call in reply.tool_calls]
    if draw(st.integers(0, 3)) == 0:  # the client has ids of its own
        names = {call.id: f"own_{results[place].text}" for place, call in enumerate(calls)}
        calls = [replace(call, id=names[call.id]) for call in calls]
        results = [replace(result, tool_call_id=names[result.tool_call_id or ""]) for result in results]
    text = reply.text.strip()
    cut = draw(st.integers(0, len(text)))
    texts = [piece.strip() if draw(st.booleans()) else piece for piece in (text[:cut], text[cut:])]
    assume("".join(texts) == text or not (text[:cut][-1:].isspace() and text[cut:][:1].isspace()))
    pieces: list[Message] = []
    kind = draw(st.sampled_from(["none", "own", "tags", "tags in the text"] if reply.reasoning else ["none"]))
    tags = f"<think>\n{reply.reasoning.strip()}\n</think>\n"
    if kind == "own":
        pieces.append(Message("assistant", (Reasoning(reply.reasoning),)))
    elif kind == "tags":
        pieces.append(Message("assistant", (Text(tags),)))
    elif kind == "tags in the text":
        texts[0] = tags + texts[0]
    pieces += [Message("assistant", (Text(piece),)) for piece in texts if piece]
    groups: list[list[ToolCall]] = []
    for call in calls:
        if groups and draw(st.booleans()):
            groups[-1].append(call)
        else:
            groups.append([call])
    by_call = {result.tool_call_id: result for result in results}
    is_interleaved = draw(st.booleans())
    waiting: list[Message] = []
    for group in groups:
        pieces.append(Message("assistant", (), tuple(group)))
        waiting += [by_call[call.id] for call in group]
        if is_interleaved:
            pieces, waiting = pieces + waiting, []
    pieces = joined(draw, pieces)
    return [*pieces, *draw(st.permutations(waiting))]


def joined(draw: Any, pieces: Sequence[Message]) -> list[Message]:
    """Some neighbours of the assistant's in one message."""
    out: list[Message] = []
    for piece in pieces:
        last = out[-1] if out else None
        if last is not None and last.role == piece.role == "assistant" and draw(st.booleans()):
            out[-1] = Message("assistant", (*last.parts, *piece.parts), (*last.tool_calls, *piece.tool_calls))
        else:
            out.append(piece)
    return out


def results_of(reply: Message, turn: int) -> list[Message]:
    return [
        Message("tool", (Text(f"result {turn}.{place}"),), tool_call_id=call.id)
        for place, call in enumerate(reply.tool_calls)
    ]


def linked(messages: Sequence[Message]) -> tuple[Message, ...]:
    return Linker(CacheSpace()).link(messages, "messages[{}]".format)


def assert_continues(plan: Any, node: CallNode) -> None:
    assert plan.break_ is None, plan.break_
    context = node.context_ids()
    np.testing.assert_array_equal(plan.prompt_ids[: len(context)], context)


@PROPERTY
@given(data=st.data())
def test_a_lawful_spelling_is_bridged(world: Any, data: st.DataObject) -> None:
    """Every turn is spelled anew in every request, and each prompt begins with all that was sampled before it."""
    fresh = World(world.renderer, "keep")
    turns: list[tuple[Message, list[Message]]] = []
    nodes: list[CallNode] = []
    for number in range(data.draw(st.integers(1, 3))):
        history = [user("go")]
        for reply, results in turns:
            history += data.draw(respelled(reply, results))
            history += [] if results else [user("on")]
        node = fresh.call(*linked(history), output=data.draw(outputs()))
        if nodes:
            assert_continues(fresh.planned, nodes[-1])
            assert node.parent is nodes[-1]
        assert node.reply is not None
        nodes.append(node)
        turns.append((node.reply, results_of(node.reply, number)))
    history = [user("go")]
    for reply, results in turns:
        history += data.draw(respelled(reply, results))
        history += [] if results else [user("on")]
    assert_continues(fresh.plan(fresh.request(*linked(history))), nodes[-1])


EDITS = ["argument", "name", "drop a call", "repeat a call", "swap calls", "word", "cut", "thinking", "role between"]


def edited(draw: Any, kind: str, reply: Message, results: list[Message]) -> list[Message]:
    """The reply with one real edit, in any spelling. The results follow the calls that are left."""
    calls = list(reply.tool_calls)
    text = reply.text
    match kind:
        case "argument":
            value = json.loads(calls[-1].arguments) | {"new": 12345678901234567891234}
            calls[-1] = replace(calls[-1], arguments=json.dumps(value))
        case "name":
            calls[0] = replace(calls[0], name="bash2")
        case "drop a call":
            calls.pop(draw(st.integers(0, len(calls) - 1)))
        case "repeat a call":
            calls.append(replace(calls[-1], id="call_again"))
        case "swap calls":
            calls[0], calls[-1] = calls[-1], calls[0]
        case "word":
            text = f"{text.strip()} x"
        case "cut":
            text = text.strip()[:-1]
    parts: tuple[Part, ...] = (Text(text),) if text else ()
    if kind == "thinking":
        tags = f"<think>\n{reply.reasoning.strip()}!\n</think>\n"
        parts = draw(st.sampled_from([(Reasoning(reply.reasoning + "!"), *parts), (Text(tags), *parts)]))
    changed = Message("assistant", parts, tuple(calls))
    known = {result.tool_call_id: result for result in results}
    own = [known.get(call.id) or Message("tool", (Text("again"),), tool_call_id=call.id) for call in calls]
    if kind == "role between":
        first, rest = replace(changed, tool_calls=tuple(calls[:1])), Message("assistant", (), tuple(calls[1:]))
        return [first, own[0], user("no"), rest, *own[1:]]
    if kind == "thinking":
        return [changed, *own]
    return draw(respelled(changed, own))


@PROPERTY
@given(data=st.data())
def test_an_edit_in_any_spelling_breaks(world: Any, data: st.DataObject) -> None:
    fresh = World(world.renderer, "keep")
    node = fresh.call(user("go"), output=data.draw(outputs()))
    reply = node.reply
    assert reply is not None
    kind = data.draw(st.sampled_from(EDITS))
    needs = {"argument": 1, "name": 1, "drop a call": 1, "repeat a call": 1, "swap calls": 2, "role between": 2}
    assume(len(reply.tool_calls) >= needs.get(kind, 0))
    if kind == "swap calls":
        assume(json.loads(reply.tool_calls[0].arguments) != json.loads(reply.tool_calls[-1].arguments))
    assume(kind != "cut" or reply.text.strip())
    assume(kind != "thinking" or reply.reasoning.strip())
    history = edited(data.draw, kind, reply, results_of(reply, 0))
    plan = fresh.plan(fresh.request(*linked([user("go"), *history, user("on")])))
    assert plan.break_ is not None, kind
    assert plan.break_.reason is BreakReason.HISTORY_EDITED
    shared = plan.prompt_ids[: plan.shared]
    np.testing.assert_array_equal(shared, node.context_ids()[: plan.shared])


def test_replies_of_their_own_are_never_joined(world: Any) -> None:
    """Two recorded replies next to each other are two, though another recorded reply has the text of both."""
    whole = world.call(user("go"), output="onetwo<|im_end|>")
    first = world.call(user("go"), output="one<|im_end|>")
    assert first.reply is not None
    second = world.call(user("go"), first.reply, output="two<|im_end|>")
    assert second.reply is not None
    assert whole.reply is not None
    assert_continues(world.plan(world.request(user("go"), first.reply, second.reply, user("on"))), second)
    assert_continues(world.plan(world.request(user("go"), whole.reply, user("on"))), whole)


def test_a_foreign_message_before_a_reply_is_not_its_text(world: Any) -> None:
    foreign = Message("assistant", (Text("Hello."),))
    node = world.call(user("go"), foreign, output=BLOCK.format("{}") + "<|im_end|>")
    assert node.reply is not None
    history = [user("go"), foreign, node.reply, *results_of(node.reply, 0)]
    assert_continues(world.plan(world.request(*linked(history))), node)


def test_thinking_in_tags_that_was_never_sampled_is_text(world: Any) -> None:
    node = world.call(user("go"), output="Yes.<|im_end|>")
    made_up = Message("assistant", (Text("<think>\nhm\n</think>\nYes."),))
    plan = world.plan(world.request(user("go"), made_up, user("on")))
    assert plan.break_ is not None
    assert "hm" in world.tokenizer.decode(plan.prompt_ids.tolist())
    assert plan.parent is node


def test_pieces_are_joined_after_an_edit_too(world: Any) -> None:
    """The handles name the reply, wherever it stands: it is rendered as one turn, with its results behind it."""
    node = world.call(user("go"), output=f"{BLOCK.format('{}')}\n{BLOCK.format('{}')}<|im_end|>")
    assert node.reply is not None
    one, two = node.reply.tool_calls
    first, second = results_of(node.reply, 0)
    pieces = [Message("assistant", (), (one,)), first, Message("assistant", (), (two,)), second]
    whole = [Message("assistant", (), (one, two)), first, second]
    plans = [world.plan(world.request(*linked([user("stop"), *turn]))) for turn in (pieces, whole)]
    np.testing.assert_array_equal(plans[0].prompt_ids, plans[1].prompt_ids)
    assert plans[0].break_.reason is BreakReason.HISTORY_EDITED


def test_a_long_loop_of_split_turns_is_read_once(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that goes on from the last one reads only the last turn again, and gets the same digests."""
    history = [user("go")]
    for number in range(6):
        node = world.call(*linked(history), output=f"{BLOCK.format('{}')}\n{BLOCK.format('{}')}<|im_end|>")
        assert node.reply is not None
        one, two = node.reply.tool_calls
        first, second = results_of(node.reply, number)
        history += [Message("assistant", (), (one,)), first, Message("assistant", (), (two,)), second]
    known = linked(history)
    world.forest.outline("policy", world.request(*known))
    more = (*known, user("on"))
    grown = world.forest.outline("policy", world.request(*more))
    world.forest.release()
    world.forest._outlined.clear()
    anew = world.forest.outline("policy", world.request(*more))
    assert (grown.links, grown.messages, grown.firsts) == (anew.links, anew.messages, anew.firsts)
    assert len(anew.messages) == 1 + 6 * 3 + 1
    assert anew.place_in_request(4) == 5


@pytest.mark.parametrize("piece", [Message("assistant"), Message("assistant", (Text("<think>\nx"),)), Message("tool")])
def test_a_hostile_history_costs_no_more_than_its_length(world: Any, piece: Message) -> None:
    """Every message could begin a reply that all the others are pieces of."""
    node = world.call(user("go"), output=f"<think>\nhm\n</think>\n\nYes.{BLOCK.format('{}')}<|im_end|>")
    assert node.reply is not None
    handle = world.handles.mint(node.call_id, 9)
    named = replace(piece, handle=handle) if piece.role == "assistant" else piece
    history = [Message("assistant", handle=handle) if number % 3 == 0 else named for number in range(600)]
    digests = 0

    def digest(message: Message) -> bytes:
        nonlocal digests
        digests += 1
        return message_digest(message)

    turns = TurnReader(world.forest, digest).read([user("go"), *history], b"")
    assert len(turns.messages) == 601
    assert digests < 601 * 2 * MAX_PIECES
