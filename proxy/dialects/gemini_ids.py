"""Ids for Gemini's function calls and responses. Some clients omit the ids or send responses twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rolltap.proxy.cache_space import WeighedCache, message_bytes
from rolltap.proxy.conversation.chat import Message


@dataclass(slots=True)
class UnansweredCall:
    """A function call that has no response yet."""

    id: str
    name: str


class Identifier:
    """Adds missing ids to calls and responses, and drops repeated responses.

    One per dialect: equal histories get the same message objects.
    """

    def __init__(self) -> None:
        self._calls_with_ids: WeighedCache[tuple[Message, int], Message] = WeighedCache(message_bytes)
        self._responses_with_ids: WeighedCache[tuple[Message, str], Message] = WeighedCache(message_bytes)

    def __call__(self, messages: Sequence[Message], places: Sequence[str]) -> tuple[list[Message], list[str]]:
        open_calls: list[UnansweredCall] = []
        responses: dict[str, Message] = {}
        kept_messages: list[Message] = []
        kept_places: list[str] = []
        count = 0
        for message, place in zip(messages, places, strict=True):
            if message.tool_calls:
                if not all(call.id for call in message.tool_calls):
                    message = self._calls_with_ids.get((message, count), _with_call_ids)
                count += len(message.tool_calls)
                open_calls = [UnansweredCall(call.id, call.name) for call in message.tool_calls]
            elif message.role == "tool":
                resolved = self._response(message, open_calls, responses)
                if resolved is None:
                    continue
                message = resolved
            kept_messages.append(message)
            kept_places.append(place)
        return kept_messages, kept_places

    def _response(
        self, message: Message, open_calls: list[UnansweredCall], responses: dict[str, Message]
    ) -> Message | None:
        """Returns the response with its call's id; None if it repeats an earlier response."""
        same_name = [call for call in open_calls if call.name == message.name]
        if not message.tool_call_id:
            if not same_name:
                return None if any(_is_repeat(message, earlier) for earlier in responses.values()) else message
            message = self._responses_with_ids.get((message, same_name[0].id), _with_call_id)
        call_id = message.tool_call_id or ""
        if call_id in responses and _is_repeat(message, responses[call_id]):
            return None
        open_calls[:] = [call for call in open_calls if call.id != call_id]
        responses[call_id] = message
        return message


def _with_call_ids(key: tuple[Message, int]) -> Message:
    message, start = key
    calls = tuple(
        call if call.id else msgspec.structs.replace(call, id=f"call_{start + offset}")
        for offset, call in enumerate(message.tool_calls)
    )
    return msgspec.structs.replace(message, tool_calls=calls)


def _with_call_id(key: tuple[Message, str]) -> Message:
    message, call_id = key
    return msgspec.structs.replace(message, tool_call_id=call_id)


def _is_repeat(a: Message, b: Message) -> bool:
    return a.name == b.name and a.parts == b.parts
