"""Call ids and extras in prompts: those that the model sampled or an upstream gave, in the place of our handles.

The client gets a handle as a call's id. Some families read an id in a prompt (Kimi takes the tool's name from it), and
upstreams compare ids with those that they gave. So the id that belongs there is kept in the recorded reply
(`ToolCall.given_id`) and put back before a prompt is rendered or an upstream is asked. So are a call's extras and the
upstream's blocks of the thinking before its calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from rolltap.protocols.conversation import Message, Reasoning, ToolCall
from rolltap.protocols.handles import Handles
from rolltap.proxy.continuation.forest import Forest


class EchoedCall(NamedTuple):
    """A tool call of a recorded reply, which the client sends back."""

    call: ToolCall
    reply: Message


def recorded_calls(messages: Sequence[Message], forest: Forest, handles: Handles) -> dict[str, EchoedCall]:
    """The recorded call for each id in `messages` that is a handle of a reply in the forest."""
    named = {call.id for message in messages for call in message.tool_calls}
    named |= {message.tool_call_id for message in messages if message.tool_call_id}
    calls: dict[str, EchoedCall] = {}
    for handle in named:
        node = forest.nodes.get(handles.read(handle) or "")
        if node is not None and node.reply is not None:
            reply = node.reply
            calls |= {call.id: EchoedCall(call, reply) for call in reply.tool_calls if call.id == handle}
    return calls


def as_recorded(messages: Sequence[Message], calls: Mapping[str, EchoedCall]) -> list[Message]:
    """The messages with what belongs to the recorded `calls`, by the ids that the client sends: given ids, extras, and
    the thinking's blocks."""
    ids = {id: recorded.call.given_id for id, recorded in calls.items() if recorded.call.given_id}
    wanted = {
        ids.get(id, id): recorded
        for id, recorded in calls.items()
        if recorded.call.extra or recorded.reply.reasoning_details
    }
    rows = with_ids(messages, ids)
    return [_with_extras(message, wanted) for message in rows] if wanted else rows


def _with_extras(message: Message, recorded: Mapping[str, EchoedCall]) -> Message:
    known = [recorded[call.id] for call in message.tool_calls if call.id in recorded]
    if not known:
        return message
    calls = tuple(
        msgspec.structs.replace(call, extra=recorded[call.id].call.extra) if call.id in recorded else call
        for call in message.tool_calls
    )
    parts, thoughts = message.parts, [part for part in known[0].reply.parts if isinstance(part, Reasoning)]
    if known[0].reply.reasoning_details:
        parts = (*thoughts, *(part for part in parts if not isinstance(part, Reasoning)))
    return msgspec.structs.replace(message, tool_calls=calls, parts=parts)


def with_ids(messages: Sequence[Message], ids: Mapping[str, str]) -> list[Message]:
    """The messages with each id of `ids` replaced, in calls and results. Messages without one are the same objects."""
    return [_with_ids(message, ids) for message in messages]


def _with_ids(message: Message, ids: Mapping[str, str]) -> Message:
    if any(ids.get(call.id, call.id) != call.id for call in message.tool_calls):
        calls = tuple(msgspec.structs.replace(call, id=ids.get(call.id, call.id)) for call in message.tool_calls)
        return msgspec.structs.replace(message, tool_calls=calls)
    given = message.tool_call_id
    if given is not None and ids.get(given, given) != given:
        return msgspec.structs.replace(message, tool_call_id=ids[given])
    return message
