"""Completes requests that only name recorded messages: `previous_response_id`, item references and compactions.

`recall` inserts the recorded messages, so that later stages see a complete history. As in OpenAI's protocol,
`instructions` and tools come from the new request alone; those of earlier requests are not carried over.
"""

from __future__ import annotations

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
    messages = [await _resolve(message, find) for turns in reversed(history) for message in turns]
    linked = (linker or Linker()).link(messages, "input[{}]".format)
    return msgspec.structs.replace(request, messages=(*instructions, *linked), previous=None, recalls=False)


def _split(request: ChatRequest) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Returns the message of the request's own `instructions`, if any, and the other messages."""
    count = 1 if INSTRUCTIONS in request.fixed else 0
    return request.messages[:count], request.messages[count:]


async def _resolve(message: Message, find: FindCall) -> Message:
    if not message.recall:
        return message
    call = await find(message.handle or "")
    if message.role == "user":
        if call is None:
            why = "in this session; a compaction of another server or session can't be read"
            raise invalid("input", f"no compaction {(message.handle or '')[:80]!r} is on record {why}")
        return summary(call.reply)
    if call is None:
        raise invalid("input", f"no item {message.handle!r} is on record in this session; send the item itself")
    return call.reply
