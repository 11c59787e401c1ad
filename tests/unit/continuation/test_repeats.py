"""A session may send the same requests thousands of times: a call costs the same as after a few."""

from __future__ import annotations

import time
from statistics import median

from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.types import BreakReason

from .conftest import World

FIRST = Message("user", (Text("list the files"),))
SECOND = Message("user", (Text("and now the folders"),))
REPEATS = 2000


def plan_s(world: World, *messages: Message) -> float:
    """The median CPU time of a plan."""

    def once() -> float:
        request = world.request(*messages)
        started = time.thread_time()
        world.plan(request)
        return time.thread_time() - started

    return median(once() for _ in range(40))


def test_repeats_of_a_conversation_cost_the_same(family: FamilyRenderer) -> None:
    world = World(family)

    def converse() -> Message:
        reply = world.call(FIRST, output="a.txt<|im_end|>").reply
        assert reply is not None
        world.call(FIRST, reply, SECOND, output="none<|im_end|>")
        return reply

    reply = [converse() for _ in range(20)][-1]
    begin, turn = plan_s(world, FIRST), plan_s(world, FIRST, reply, SECOND)
    for _ in range(REPEATS):
        converse()
    assert plan_s(world, FIRST) < 2 * begin
    assert plan_s(world, FIRST, reply, SECOND) < 2 * turn
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
