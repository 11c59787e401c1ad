"""Checks a history: every tool result must answer an earlier call.

The check is the same in every dialect. It also sets the tool's name on each tool message: only Gemini's wire format has
the name, and some chat templates need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.proxy.cache_space import SHARED, CacheSpace, Kept, message_bytes
from rolltap.proxy.conversation.chat import Message
from rolltap.proxy.dialects.json_request import invalid

HISTORIES = 16
"""Maximum number of long histories that are remembered."""

LONG = 64
"""Minimum number of messages of a history that is remembered."""


@dataclass(slots=True, eq=False)
class LinkedHistory:
    """A checked history: the `messages` with their tools' names, the tool of each call id, and the answered calls.

    `source`: the messages before linking. `size`: approximate bytes of the history.
    """

    source: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    tools_by_call: dict[str, str] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    size: int = 0

    def copy(self) -> LinkedHistory:
        tools, answered = self.tools_by_call.copy(), self.answered.copy()
        return LinkedHistory(self.source, self.messages.copy(), tools, answered, self.size)


class Linker:
    """Links tool results to their calls. One per dialect: it returns one object per message and name.

    `link` checks a whole history. If the history begins with a remembered one (the same objects), only the rest is
    linked. `extend` is for a dialect that knows which history a request extends.
    """

    def __init__(self, space: CacheSpace = SHARED) -> None:
        self._named: Kept[tuple[Message, str], Message] = Kept(message_bytes, space)
        self._last: Kept[int, LinkedHistory] = Kept(lambda linked: linked.size, space)
        self._numbers = count()

    def link(
        self, messages: Sequence[Message], place: Callable[[int], str], *, whole: bool = True
    ) -> tuple[Message, ...]:
        """Returns the messages with their tools' names. `place(i)` is the path of message i, for error messages.

        A call id may repeat in a later turn (some clients count from zero), but not within one turn, and a call is
        answered once. Without the `whole` history, results may answer calls that are only on record.
        """
        if not whole:
            linked = LinkedHistory()
            self._append(linked, messages, place, whole=False)
            return tuple(linked.messages)
        number, former = self._longest_prefix(messages)
        linked = self.extend(former, messages[len(former.source) if former else 0 :], place)
        linked.source = tuple(messages)
        self._last.pop(number)
        if len(messages) >= LONG:
            self._last.put(next(self._numbers), linked)
            if len(self._last) > HISTORIES:
                self._last.drop_oldest()
        return tuple(linked.messages)

    def extend(
        self, former: LinkedHistory | None, added: Sequence[Message], place: Callable[[int], str]
    ) -> LinkedHistory:
        """Returns the history `former` extended by the messages `added`. `former` is not changed."""
        linked = former.copy() if former is not None else LinkedHistory()
        self._append(linked, added, place, whole=True)
        return linked

    def _longest_prefix(self, messages: Sequence[Message]) -> tuple[int, LinkedHistory | None]:
        """Returns the longest remembered history that this one begins with, and its number; -1 and None without one."""
        prefixes = [
            (number, linked)
            for number, linked in self._last.items()
            if len(linked.source) <= len(messages)
            and linked.source[-1] is messages[len(linked.source) - 1]
            and linked.source == tuple(messages[: len(linked.source)])
        ]
        return max(prefixes, key=lambda numbered: len(numbered[1].source), default=(-1, None))

    def _append(
        self, linked: LinkedHistory, added: Sequence[Message], place: Callable[[int], str], *, whole: bool
    ) -> None:
        for index, message in enumerate(added, len(linked.messages)):
            if message.role == "tool":
                call_id = message.tool_call_id or ""
                name = linked.tools_by_call.get(call_id)
                if call_id in linked.answered:
                    raise invalid(place(index), f"a second tool result for the call {call_id!r}")
                if name is None and whole:
                    raise invalid(place(index), f"a tool result for the call {call_id!r}, which no earlier turn made")
                linked.answered.add(call_id)
                if name is not None and message.name != name:
                    message = self._named.get((message, name), _with_name)
            elif message.tool_calls:
                linked.tools_by_call |= _tools_by_call(message, place(index))
                linked.answered.difference_update(call.id for call in message.tool_calls)
            linked.messages.append(message)
            linked.size += message_bytes(message)


def _with_name(key: tuple[Message, str]) -> Message:
    message, name = key
    return msgspec.structs.replace(message, name=name)


def _tools_by_call(message: Message, place: str) -> dict[str, str]:
    tools = {call.id: call.name for call in message.tool_calls}
    if len(tools) < len(message.tool_calls):
        raise invalid(place, "two tool calls of one turn have the same id")
    return tools


def unknown_tool(name: str, known: Sequence[str], param: str) -> InvalidRequest:
    """Returns the error for a forced tool that is not declared."""
    return invalid(param, f"no tool {name!r} in tools; declared: {', '.join(known) or 'none'}")
