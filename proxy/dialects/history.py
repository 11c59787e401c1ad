"""Checks a history: every tool result must answer an earlier call.

The check is the same in every dialect. It also sets on each tool message the tool's name (only Gemini's wire format has
it, and some chat templates need it) and which call it answers, if the results are not in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.proxy.cache_space import SHARED, CacheSpace, WeighedCache, message_bytes
from rolltap.proxy.conversation.chat import Message
from rolltap.proxy.dialects.json_request import invalid

HISTORIES = 16
"""Maximum number of long histories that are remembered."""

LONG = 64
"""Minimum number of messages of a history that is remembered."""


@dataclass(slots=True, eq=False)
class LinkedHistory:
    """A checked history: the linked `messages`, the tool and the number of each call id, and the answered calls.

    `source`: the messages before linking. `call_count`: the number of calls. `next_call`: the number of the call that
    the next result answers, if the results are in the order of the last turn's calls. `size`: approximate bytes.
    """

    source: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    calls: dict[str, tuple[str, int]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    call_count: int = 0
    next_call: int = 0
    size: int = 0

    def copy(self) -> LinkedHistory:
        return replace(self, messages=self.messages.copy(), calls=self.calls.copy(), answered=self.answered.copy())


class Linker:
    """Links tool results to their calls. One per dialect: it returns one object per message, name and offset.

    `link` checks a whole history. If the history begins with a remembered one (the same objects), only the rest is
    linked. `extend` is for a dialect that knows which history a request extends.
    """

    def __init__(self, space: CacheSpace = SHARED) -> None:
        self._linked: WeighedCache[tuple[Message, str, int], Message] = WeighedCache(message_bytes, space)
        self._last: WeighedCache[int, LinkedHistory] = WeighedCache(lambda linked: linked.size, space)
        self._numbers = count()

    def link(
        self, messages: Sequence[Message], place: Callable[[int], str], *, whole: bool = True
    ) -> tuple[Message, ...]:
        """Returns the linked messages. `place(i)` is the path of message i, for error messages.

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
                call = linked.calls.get(call_id)
                if call_id in linked.answered:
                    raise invalid(place(index), f"a second tool result for the call {call_id!r}")
                if call is None and whole:
                    raise invalid(place(index), f"a tool result for the call {call_id!r}, which no earlier turn made")
                linked.answered.add(call_id)
                if call is not None:
                    message = self._answer(message, call[0], call[1] - linked.next_call)
                linked.next_call += 1
            elif message.tool_calls:
                linked.calls |= _numbered_calls(message, linked.call_count, place(index))
                linked.next_call = linked.call_count
                linked.call_count += len(message.tool_calls)
                linked.answered.difference_update(call.id for call in message.tool_calls)
            linked.messages.append(message)
            linked.size += message_bytes(message)

    def _answer(self, result: Message, name: str, offset: int) -> Message:
        """Returns the result with its tool's name and its call's offset."""
        if (result.name, result.call_offset) == (name, offset):
            return result
        return self._linked.get((result, name, offset), _with_call)


def _with_call(key: tuple[Message, str, int]) -> Message:
    message, name, offset = key
    return msgspec.structs.replace(message, name=name, call_offset=offset)


def _numbered_calls(message: Message, before: int, place: str) -> dict[str, tuple[str, int]]:
    """Returns the tool and the number of each call of a turn, after the `before` calls of earlier turns."""
    calls = {call.id: (call.name, number) for number, call in enumerate(message.tool_calls, before)}
    if len(calls) < len(message.tool_calls):
        raise invalid(place, "two tool calls of one turn have the same id")
    return calls


def unknown_tool(name: str, known: Sequence[str], param: str) -> InvalidRequest:
    """Returns the error for a forced tool that is not declared."""
    return invalid(param, f"no tool {name!r} in tools; declared: {', '.join(known) or 'none'}")
