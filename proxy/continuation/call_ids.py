"""Call ids in prompts: those that the model sampled or an upstream gave, in the place of our handles.

The client gets a handle as a call's id. Some families read an id in a prompt (Kimi takes the tool's name from it), and
upstreams compare ids with those that they gave. So the id that belongs there is kept in the recorded reply
(`ToolCall.given_id`) and put back before a prompt is rendered or an upstream is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.handles import Handles
from rolltap.proxy.conversation.chat import Message, ToolCall


def recorded_calls(messages: Sequence[Message], forest: Forest, handles: Handles) -> dict[str, ToolCall]:
    """The recorded call for each id in `messages` that is a handle of a reply in the forest."""
    named = {call.id for message in messages for call in message.tool_calls}
    named |= {message.tool_call_id for message in messages if message.tool_call_id}
    calls: dict[str, ToolCall] = {}
    for handle in named:
        node = forest.nodes.get(handles.read(handle) or "")
        reply = node.reply if node is not None else None
        calls |= {call.id: call for call in (reply.tool_calls if reply is not None else ()) if call.id == handle}
    return calls


def as_recorded(messages: Sequence[Message], calls: Mapping[str, ToolCall]) -> list[Message]:
    """The messages with the given ids and the extras of the recorded `calls`, by the ids that the client sends."""
    ids = {id: call.given_id for id, call in calls.items() if call.given_id}
    extras = {ids.get(id, id): call.extra for id, call in calls.items() if call.extra}
    rows = with_ids(messages, ids)
    return [_with_extras(message, extras) for message in rows] if extras else rows


def _with_extras(message: Message, extras: Mapping[str, dict[str, Any]]) -> Message:
    if not any(call.id in extras for call in message.tool_calls):
        return message
    calls = (msgspec.structs.replace(call, extra=extras.get(call.id, call.extra)) for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=tuple(calls))


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
