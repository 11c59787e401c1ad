"""What a history must hold together: every tool result answers a call that stands before it.

The check is the same in every dialect. It also gives each tool message the name of the tool that it answers, which
only Gemini's wire has and some chat templates need.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rolltap.errors import InvalidRequest
from rolltap.proxy.chat import Message
from rolltap.proxy.dialects.items import DERIVED_BYTES, Kept, message_bytes
from rolltap.proxy.dialects.reading import invalid


class Linker:
    """Links tool results to their calls. One per dialect: it hands out one object per message and name."""

    def __init__(self) -> None:
        self._named: Kept[tuple[Message, str], Message] = Kept(DERIVED_BYTES, message_bytes)

    def link(self, messages: Sequence[Message], places: Sequence[str], *, whole: bool = True) -> tuple[Message, ...]:
        """The messages with their tools' names; `places[i]` is where message i came from, for refusals.

        A call id may come again in a later turn (some clients count from zero), but not twice in one turn, and a
        call is answered once. Without the `whole` history, results may answer calls that only the record holds.
        """
        named: dict[str, str] = {}
        answered: set[str] = set()
        out: list[Message] = []
        for message, place in zip(messages, places, strict=True):
            if message.role == "tool":
                call_id = message.tool_call_id or ""
                name = named.get(call_id)
                if call_id in answered:
                    raise invalid(place, f"a second tool result for the call {call_id!r}")
                if name is None and whole:
                    raise invalid(place, f"a tool result for the call {call_id!r}, which no earlier turn made")
                answered.add(call_id)
                if name is not None and message.name != name:
                    message = self._named.get((message, name), _with_name)
            elif message.tool_calls:
                named |= _calls(message, place)
                answered.difference_update(call.id for call in message.tool_calls)
            out.append(message)
        return tuple(out)


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
