"""What a history must hold together: every tool result answers a call that stands before it.

The check is the same in every dialect. It also gives each tool message the name of the tool that it answers, which
only Gemini's wire has and some chat templates need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.proxy.conversation.chat import Message
from rolltap.proxy.dialects.item_cache import DERIVED_BYTES, Kept, message_bytes
from rolltap.proxy.dialects.json_request import invalid

HISTORIES = 16
"""Linked histories that are remembered, of those that are long and yet of at most `DERIVED_BYTES`."""

LONG = 64
"""Messages from which on a history is worth remembering."""


@dataclass(slots=True, eq=False)
class Linked:
    """A history that holds together: as it was `given`, with its tools' names, and what it has called and answered.

    `size` is about how many bytes it holds.
    """

    given: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    size: int = 0

    def copy(self) -> Linked:
        return Linked(self.given, self.messages.copy(), self.named.copy(), self.answered.copy(), self.size)


class Linker:
    """Links tool results to their calls. One per dialect: it hands out one object per message and name.

    A history that begins with one of the last, object by object, is linked from there on.
    """

    def __init__(self) -> None:
        self._named: Kept[tuple[Message, str], Message] = Kept(DERIVED_BYTES, message_bytes)
        self._last: deque[Linked] = deque(maxlen=HISTORIES)

    def link(
        self, messages: Sequence[Message], place: Callable[[int], str], *, whole: bool = True
    ) -> tuple[Message, ...]:
        """The messages with their tools' names; `place(i)` is where message i came from, for refusals.

        A call id may come again in a later turn (some clients count from zero), but not twice in one turn, and a
        call is answered once. Without the `whole` history, results may answer calls that only the record holds.
        """
        if not whole:
            return tuple(self._extended(Linked(), messages, place, whole=False).messages)
        former = self._longest(messages)
        linked = self._extended(former.copy() if former else Linked(), messages, place, whole=True)
        if former is not None:
            self._last.remove(former)
        if len(messages) >= LONG and linked.size <= DERIVED_BYTES:
            self._last.appendleft(linked)
        return tuple(linked.messages)

    def _longest(self, messages: Sequence[Message]) -> Linked | None:
        """The longest of the last histories that this one begins with."""
        begun = [
            linked
            for linked in self._last
            if len(linked.given) <= len(messages)
            and linked.given[-1] is messages[len(linked.given) - 1]
            and linked.given == tuple(messages[: len(linked.given)])
        ]
        return max(begun, key=lambda linked: len(linked.given), default=None)

    def _extended(
        self, linked: Linked, messages: Sequence[Message], place: Callable[[int], str], *, whole: bool
    ) -> Linked:
        """`linked` with the messages that it does not hold yet."""
        for index in range(len(linked.given), len(messages)):
            message = messages[index]
            if message.role == "tool":
                call_id = message.tool_call_id or ""
                name = linked.named.get(call_id)
                if call_id in linked.answered:
                    raise invalid(place(index), f"a second tool result for the call {call_id!r}")
                if name is None and whole:
                    raise invalid(place(index), f"a tool result for the call {call_id!r}, which no earlier turn made")
                linked.answered.add(call_id)
                if name is not None and message.name != name:
                    message = self._named.get((message, name), _with_name)
            elif message.tool_calls:
                linked.named |= _calls(message, place(index))
                linked.answered.difference_update(call.id for call in message.tool_calls)
            linked.messages.append(message)
            linked.size += message_bytes(message)
        linked.given = tuple(messages)
        return linked


def _with_name(key: tuple[Message, str]) -> Message:
    message, name = key
    return msgspec.structs.replace(message, name=name)


def _calls(message: Message, place: str) -> dict[str, str]:
    named = {call.id: call.name for call in message.tool_calls}
    if len(named) < len(message.tool_calls):
        raise invalid(place, "two tool calls of one turn have the same id")
    return named


def unknown_tool(name: str, known: Sequence[str], param: str) -> InvalidRequest:
    """A forced tool that was not declared."""
    return invalid(param, f"no tool {name!r} in tools; declared: {', '.join(known) or 'none'}")
