"""A session may send the same requests thousands of times: a call costs the same as after a few."""

from __future__ import annotations

import sys
from types import FrameType

from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.types import BreakReason

from .conftest import World

FIRST = Message("user", (Text("list the files"),))
SECOND = Message("user", (Text("and now the folders"),))
REPEATS = 2000


def plan_calls(world: World, *messages: Message) -> int:
    """The function calls of a plan, built-in ones included: a busy machine does not change them."""
    request, calls = world.request(*messages), 0

    def count(_frame: FrameType, event: str, _function: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        world.plan(request)
    finally:
        sys.setprofile(None)
    return calls


def test_repeats_of_a_conversation_cost_the_same(family: FamilyRenderer) -> None:
    world = World(family)

    def converse() -> Message:
        reply = world.call(FIRST, output="a.txt<|im_end|>").reply
        assert reply is not None
        world.call(FIRST, reply, SECOND, output="none<|im_end|>")
        return reply

    reply = [converse() for _ in range(20)][-1]
    begin, turn = plan_calls(world, FIRST), plan_calls(world, FIRST, reply, SECOND)
    for _ in range(REPEATS):
        converse()
    assert plan_calls(world, FIRST) < 1.2 * begin
    assert plan_calls(world, FIRST, reply, SECOND) < 1.2 * turn
    assert world.planned.break_ is None


def test_another_reply_among_the_repeats_is_ambiguous(family: FamilyRenderer) -> None:
    """The same text from other tokens, between replies that are equal."""
    world = World(family)
    whole = world.tokenizer.encode("a.txt<|im_end|>")
    letters = [token for letter in "a.txt" for token in world.tokenizer.encode(letter)] + whole[-1:]
    assert letters != whole
    for output in (whole, whole, letters, whole):
        reply = world.call(FIRST, output=output).reply
    assert reply is not None
    plan = world.plan(world.request(FIRST, reply, SECOND))
    assert plan.break_ is not None
    assert plan.break_.reason is BreakReason.AMBIGUOUS_PARENT
