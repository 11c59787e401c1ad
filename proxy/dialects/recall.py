"""Requests that only name what is on record: `previous_response_id` and item references.

`recall` puts the recorded messages in, so that what follows sees a whole history like any other. As in OpenAI's
protocol, `instructions` and tools are the new request's own; those of the former ones are not carried over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from rolltap.proxy.conversation.chat import ChatRequest, Message
from rolltap.proxy.dialects.history import Linker
from rolltap.proxy.dialects.reading import invalid

INSTRUCTIONS = "instructions"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded call: its request, parsed again (`reading.rebuild`), and its reply."""

    request: ChatRequest
    reply: Message


Lookup = Callable[[str], Awaitable[Recorded | None]]
"""The call that a handle names, if this session made it."""


async def recall(request: ChatRequest, lookup: Lookup) -> ChatRequest:
    """The request with its whole history; one that names an unknown call is refused. Costs one look-up a link."""
    if request.previous is None and not request.recalls:
        return request
    own, turns = _split(request)
    history: list[tuple[Message, ...]] = [turns]
    step = request
    while step.previous is not None:
        found = await lookup(step.previous)
        if found is None:
            raise invalid("previous_response_id", f"no reply {step.previous!r} is on record in this session")
        history.append((*_split(found.request)[1], found.reply))
        step = found.request
    messages = [await _known(message, lookup) for turns in reversed(history) for message in turns]
    linked = Linker().link(messages, "input[{}]".format)
    return msgspec.structs.replace(request, messages=(*own, *linked), previous=None, recalls=False)


def _split(request: ChatRequest) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The message of the request's own `instructions`, if it has any, and the others."""
    own = 1 if INSTRUCTIONS in request.fixed else 0
    return request.messages[:own], request.messages[own:]


async def _known(message: Message, lookup: Lookup) -> Message:
    if not message.recall:
        return message
    found = await lookup(message.handle or "")
    if found is None:
        raise invalid("input", f"no item {message.handle!r} is on record in this session; send the item itself")
    return found.reply
