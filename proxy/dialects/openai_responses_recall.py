"""Requests that only name what is on record: `previous_response_id` and item references.

`recall` puts the recorded messages in, so that what follows sees a whole history like any other. As in OpenAI's
protocol, `instructions` and tools are the new request's own; those of the former ones are not carried over.
"""

from __future__ import annotations

import msgspec

from rolltap.proxy.conversation.chat import ChatRequest, Message
from rolltap.proxy.dialects.base import FindCall
from rolltap.proxy.dialects.history import Linker
from rolltap.proxy.dialects.json_request import invalid

INSTRUCTIONS = "instructions"


async def recall(request: ChatRequest, find: FindCall) -> ChatRequest:
    """The request with its whole history; one that names an unknown call is refused.

    Costs one `find` for each link of the chain of `previous_response_id`s.
    """
    if request.previous is None and not request.recalls:
        return request
    own, turns = _split(request)
    history: list[tuple[Message, ...]] = [turns]
    step = request
    while step.previous is not None:
        call = await find(step.previous)
        if call is None:
            raise invalid("previous_response_id", f"no reply {step.previous!r} is on record in this session")
        history.append((*_split(call.request)[1], call.reply))
        step = call.request
    messages = [await _known(message, find) for turns in reversed(history) for message in turns]
    linked = Linker().link(messages, "input[{}]".format)
    return msgspec.structs.replace(request, messages=(*own, *linked), previous=None, recalls=False)


def _split(request: ChatRequest) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The message of the request's own `instructions`, if it has any, and the others."""
    own = 1 if INSTRUCTIONS in request.fixed else 0
    return request.messages[:own], request.messages[own:]


async def _known(message: Message, find: FindCall) -> Message:
    if not message.recall:
        return message
    call = await find(message.handle or "")
    if call is None:
        raise invalid("input", f"no item {message.handle!r} is on record in this session; send the item itself")
    return call.reply
