"""Ids for Gemini's function calls and responses, which some clients send without, or twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rolltap.proxy.cache_space import Kept, message_bytes
from rolltap.proxy.conversation.chat import Message


@dataclass(slots=True)
class UnansweredCall:
    """A function call that waits for its response."""

    id: str
    name: str


class Identifier:
    """Gives ids to calls and responses that came without, and drops repeated responses.

    One per dialect: equal histories get the same message objects.
    """

    def __init__(self) -> None:
        self._numbered: Kept[tuple[Message, int], Message] = Kept(message_bytes)
        self._answering: Kept[tuple[Message, str], Message] = Kept(message_bytes)

    def __call__(self, messages: Sequence[Message], places: Sequence[str]) -> tuple[list[Message], list[str]]:
        open_calls: list[UnansweredCall] = []
        answered: dict[str, Message] = {}
        out: list[Message] = []
        kept: list[str] = []
        count = 0
        for message, place in zip(messages, places, strict=True):
            if message.tool_calls:
                if not all(call.id for call in message.tool_calls):
                    message = self._numbered.get((message, count), _numbered)
                count += len(message.tool_calls)
                open_calls = [UnansweredCall(call.id, call.name) for call in message.tool_calls]
            elif message.role == "tool":
                resolved = self._response(message, open_calls, answered)
                if resolved is None:
                    continue
                message = resolved
            out.append(message)
            kept.append(place)
        return out, kept

    def _response(
        self, message: Message, open_calls: list[UnansweredCall], answered: dict[str, Message]
    ) -> Message | None:
        """The response with its call's id; None if it repeats one."""
        named = [call for call in open_calls if call.name == message.name]
        if not message.tool_call_id:
            if not named:
                return None if any(_same(message, earlier) for earlier in answered.values()) else message
            message = self._answering.get((message, named[0].id), _answering)
        call_id = message.tool_call_id or ""
        if call_id in answered and _same(message, answered[call_id]):
            return None
        open_calls[:] = [call for call in open_calls if call.id != call_id]
        answered[call_id] = message
        return message


def _numbered(key: tuple[Message, int]) -> Message:
    message, start = key
    calls = tuple(
        call if call.id else msgspec.structs.replace(call, id=f"call_{start + offset}")
        for offset, call in enumerate(message.tool_calls)
    )
    return msgspec.structs.replace(message, tool_calls=calls)


def _answering(key: tuple[Message, str]) -> Message:
    message, call_id = key
    return msgspec.structs.replace(message, tool_call_id=call_id)


def _same(a: Message, b: Message) -> bool:
    return a.name == b.name and a.parts == b.parts
