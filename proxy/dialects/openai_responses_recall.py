"""Completes requests that only name recorded messages: `previous_response_id`, item references and compactions.

`recall` inserts the recorded messages, so that later stages see a complete history. As in OpenAI's protocol,
`instructions` and tools come from the new request alone; those of earlier requests are not carried over.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rolltap.proxy.conversation.chat import ChatRequest, Message
from rolltap.proxy.dialects.base import FindCall
from rolltap.proxy.dialects.history import Linker
from rolltap.proxy.dialects.json_request import invalid
from rolltap.proxy.dialects.openai_responses_compaction import summary

INSTRUCTIONS = "instructions"


async def recall(request: ChatRequest, find: FindCall, linker: Linker | None = None) -> ChatRequest:
    """Returns the request with its whole history. Raises `InvalidRequest` if it names an unknown call.

    `linker`: the dialect's own, which returns one object per message.

    Costs one `find` for each link of the chain of `previous_response_id`s.
    """
    if request.previous is None and not request.recalls:
        return request
    instructions, turns = _split(request)
    history: list[tuple[Message, ...]] = [turns]
    step = request
    while step.previous is not None:
        call = await find(step.previous)
        if call is None:
            raise invalid("previous_response_id", f"no reply {step.previous!r} is on record in this session")
        history.append((*_split(call.request)[1], call.reply))
        step = call.request
    messages = await _resolved([message for turns in reversed(history) for message in turns], find)
    linked = (linker or Linker()).link(messages, "input[{}]".format)
    return msgspec.structs.replace(request, messages=(*instructions, *linked), previous=None, recalls=False)


def _split(request: ChatRequest) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Returns the message of the request's own `instructions`, if any, and the other messages."""
    count = 1 if INSTRUCTIONS in request.fixed else 0
    return request.messages[:count], request.messages[count:]


async def _resolved(messages: Sequence[Message], find: FindCall) -> list[Message]:
    """The messages with the replies that they name. A turn that is named several times, between its results, is one."""
    out: list[Message] = []
    place, named = -1, None  # the reply that was named last, in the turn that is not over
    for message in messages:
        if message.role == "user" and message.recall:
            message = await _summary(message, find)
        if message.role not in ("assistant", "tool"):
            place = -1
        elif message.recall:
            call = await find(message.handle or "")
            if call is None:
                raise invalid("input", f"no item {message.handle!r} is on record in this session; send the item itself")
            if place < 0 or call.reply != named or not call.reply.tool_calls:
                place, named = len(out), call.reply
                out.append(call.reply)
            out[place] = _with_items(out[place], message)
            continue
        elif place >= 0 and message.tool_calls and _is_part(message, out[place]):
            out[place] = _with_items(out[place], message)
            continue
        out.append(message)
    return out


def _is_part(piece: Message, reply: Message) -> bool:
    """Whether all calls of `piece` are the reply's, by their ids."""
    return {call.id for call in piece.tool_calls} <= {call.id for call in reply.tool_calls}


def _with_items(reply: Message, message: Message) -> Message:
    """The recorded reply with the items that the client sent itself in the place of its own."""
    sent = {call.id: call for call in message.tool_calls}
    calls = tuple(sent.pop(call.id, call) for call in reply.tool_calls) + tuple(sent.values())
    kinds = {type(part) for part in message.parts}
    if calls == reply.tool_calls and not kinds:
        return reply
    parts = (*message.parts, *(part for part in reply.parts if type(part) not in kinds))
    return msgspec.structs.replace(reply, parts=parts, tool_calls=calls)


async def _summary(message: Message, find: FindCall) -> Message:
    """The summary that a compaction item names."""
    call = await find(message.handle or "")
    if call is None:
        why = "in this session; a compaction of another server or session can't be read"
        raise invalid("input", f"no compaction {(message.handle or '')[:80]!r} is on record {why}")
    return summary(call.reply)
