"""Links a history: finds the call that each tool result answers, and what tools returned that is not text.

All dialects use it. It sets each tool message's tool name (only Gemini's wire format has it, and some chat templates
need it) and, if the results are not in the order of the calls, the call that it answers. A duplicate result, or one
whose call is missing, stays in its place and is marked: model servers render it, too.

A document becomes a line of text if a tool returned it, and is refused if a user sent it. Media in a tool's result, or
in the user message that follows it, count as the tool's, since some protocols have no media in results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.protocols.cache_space import CacheSpace, WeighedCache, message_bytes
from rolltap.protocols.conversation import (
    TOOL_DOCUMENT,
    TOOL_MEDIA,
    TOOL_RESULT_REPEATED,
    TOOL_RESULT_UNMATCHED,
    Attachment,
    Image,
    Message,
    Text,
)
from rolltap.protocols.requests import invalid, join

HISTORIES = 16
"""Maximum number of long histories that are remembered."""

LONG = 64
"""Minimum number of messages of a history that is remembered."""

LinkedForm = tuple[Message, str | None, int, str | None, tuple[str, ...]]
"""A message before linking, and its name, offset, call id and marks after it."""


@dataclass(slots=True, eq=False)
class LinkedHistory:
    """A checked history: the linked `messages`, the tool and the number of each call id, and the answered calls.

    `source`: the messages before linking. `call_count`: the number of calls. `next_call`: the number of the call that
    the next result answers, if the results are in the order of the last turn's calls. `in_results`: the last message is
    a tool's, or follows one without a reply between them. `size`: approximate bytes.
    """

    source: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    calls: dict[str, tuple[str, int]] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    call_count: int = 0
    next_call: int = 0
    in_results: bool = False
    size: int = 0

    def copy(self) -> LinkedHistory:
        return replace(self, messages=self.messages.copy(), calls=self.calls.copy(), answered=self.answered.copy())


class Linker:
    """Links tool results to their calls. One per dialect: it returns one object per message, name and offset.

    `link` checks a whole history. If the history begins with a remembered one (the same objects), only the rest is
    linked. `extend` is for a dialect that knows which history a request extends.
    """

    def __init__(self, space: CacheSpace) -> None:
        self._linked: WeighedCache[LinkedForm, Message] = WeighedCache(message_bytes, space)
        self._last: WeighedCache[int, LinkedHistory] = WeighedCache(lambda linked: linked.size, space)
        self._numbers = count()

    def link(
        self, messages: Sequence[Message], place: Callable[[int], str], *, whole: bool = True
    ) -> tuple[Message, ...]:
        """Returns the linked messages. `place(i)` is the path of message i, for error messages.

        A call id may repeat in a later turn (some clients count from zero), but not within one turn. Without the
        `whole` history, results may answer calls that are only on record.
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
                message = self._result(linked, message, whole=whole)
                linked.in_results = True
            elif message.role == "assistant":
                linked.in_results = False
                if message.tool_calls:
                    calls = {
                        call.id: (call.name, number)
                        for number, call in enumerate(message.tool_calls, linked.call_count)
                    }
                    if len(calls) < len(message.tool_calls):
                        raise invalid(place(index), "two tool calls of one turn have the same id")
                    linked.calls |= calls
                    linked.next_call = linked.call_count
                    linked.call_count += len(message.tool_calls)
                    linked.answered.difference_update(call.id for call in message.tool_calls)
            elif message.role == "user":
                media = _media_marks(message)
                if media and linked.in_results:
                    message = self._linked.get((message, message.name, 0, message.tool_call_id, media), _with_form)
                elif TOOL_DOCUMENT in media:
                    part = next(part for part in message.parts if isinstance(part, Attachment))
                    why = f"a user's {part.name} is not supported; send its text"
                    raise invalid(join(place(index), part.where), why)
            linked.messages.append(message)
            linked.size += message_bytes(message)

    def _result(self, linked: LinkedHistory, result: Message, *, whole: bool) -> Message:
        """Returns a result with its tool's name, its call's offset and its marks. One without an id answers the next
        call, if that is of its tool."""
        call_id = result.tool_call_id or _next_id(linked, result.name)
        call = linked.calls.get(call_id)
        name, offset, marks = result.name, 0, _media_marks(result)
        if call is not None:
            name, offset = call[0], call[1] - linked.next_call
        if call_id in linked.answered:
            marks = (*marks, TOOL_RESULT_REPEATED)
        elif call is None and whole:
            marks = (*marks, TOOL_RESULT_UNMATCHED)
        else:
            linked.answered.add(call_id)
            linked.next_call += 1
        form = name, offset, call_id, marks
        if form == (result.name, result.call_offset, result.tool_call_id, result.marks):
            return result
        return self._linked.get((result, *form), _with_form)


def _with_form(form: LinkedForm) -> Message:
    message, name, offset, call_id, marks = form
    parts = message.parts
    if TOOL_DOCUMENT in marks:
        parts = tuple(Text(part.text) if isinstance(part, Attachment) else part for part in parts)
    return msgspec.structs.replace(
        message, parts=parts, name=name, call_offset=offset, tool_call_id=call_id, marks=marks
    )


def _media_marks(message: Message) -> tuple[str, ...]:
    """The marks of a message whose media a tool returned. An earlier linking may have replaced a document."""
    if TOOL_DOCUMENT not in message.marks and all(type(part) is Text for part in message.parts):
        return ()
    kinds = {type(part) for part in message.parts}
    has = {TOOL_MEDIA: Image in kinds, TOOL_DOCUMENT: Attachment in kinds or TOOL_DOCUMENT in message.marks}
    return tuple(mark for mark, present in has.items() if present)


def _next_id(linked: LinkedHistory, name: str | None) -> str:
    """The id of the next call, of the tool `name` if it is given; empty if there is none."""
    numbered = reversed(linked.calls.items())
    next_call = next(((call_id, tool) for call_id, (tool, own) in numbered if own == linked.next_call), ("", ""))
    return next_call[0] if name in (None, next_call[1]) else ""


def unknown_tool(name: str, known: Sequence[str], param: str) -> InvalidRequest:
    """Returns the error for a forced tool that is not declared."""
    return invalid(param, f"no tool {name!r} in tools; declared: {', '.join(known) or 'none'}")
