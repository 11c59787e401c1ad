"""Completes requests that only name recorded messages: `previous_response_id`, item references and compactions.

`recall` inserts the recorded messages, so that later stages see a complete history. As in OpenAI's protocol,
`instructions` and tools come from the new request alone; those of earlier requests are not carried over.

A compaction replaces a history by one item, which stands for a summary of it. A request asks for it by a last item of
type `compaction_trigger` (Codex since 0.16x), or by its path, `/v1/responses/compact`, which is read as if it had that
item. The policy's model samples the summary in the same conversation, so that its prompt extends the recorded tokens.
The reply is one `compaction` item, whose `encrypted_content` is the reply's handle. Sent back in `input`, it becomes
a user message with the summary, read from the record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from rolltap.protocols.base import FindCall
from rolltap.protocols.conversation import ChatRequest, Message, ReplyEnded, ReplyEvent, ReplyStarted, Text, ToolChoice
from rolltap.protocols.history import Linker
from rolltap.protocols.openai_responses.write import CompactionOut, ResponsesWriter, UsageOut, end_response, usage_out
from rolltap.protocols.replies import encode
from rolltap.protocols.requests import invalid

INSTRUCTIONS = "instructions"


async def recall(request: ChatRequest, find: FindCall, linker: Linker) -> ChatRequest:
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
    linked = linker.link(messages, "input[{}]".format)
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
        elif (
            place >= 0
            and message.tool_calls
            and {call.id for call in message.tool_calls} <= {call.id for call in out[place].tool_calls}
        ):
            out[place] = _with_items(out[place], message)
            continue
        out.append(message)
    return out


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


COMPACT = "/v1/responses/compact"
TRIGGER = b'{"type":"compaction_trigger"}'
ITEM_PREFIX = "cmp_"

PROMPT = (
    "Summarize this conversation. The work goes on from your summary alone: whoever continues it sees nothing of what "
    "is above. Repeat the user's requests word for word. State what was done and found (files, commands, results, "
    "decisions and their reasons), what holds now, and what is to be done next. Answer with the summary only, and call "
    "no tools."
)
HEAD = "The conversation before this point was replaced by a summary of it:\n\n"
UNRESOLVED = (Text("[a summary of the conversation before this point]"),)

SIGN_OF_LIFE_S = 5.0
"""Seconds between events while the summary is sampled: its text is not sent, and clients limit the silence."""


def compacting(request: ChatRequest, *, by_path: bool) -> ChatRequest:
    """The request as one that asks for a summary."""
    return msgspec.structs.replace(
        request,
        messages=(*request.messages, Message("user", (Text(PROMPT),))),
        tool_choice=ToolChoice("none"),
        sampling=msgspec.structs.replace(request.sampling, json_schema=None),
        hints=msgspec.structs.replace(request.hints, kind="summary"),
        items=(*request.items, TRIGGER) if by_path else request.items,
        wire={**request.wire, "compacts": "path" if by_path else "item"},
    )


def compaction(handle: str) -> Message:
    """The message of a compaction item, until its summary is found."""
    return Message("user", UNRESOLVED, handle=handle, recall=True)


def summary(reply: Message) -> Message:
    """The message that a compaction item stands for. A reply that was cut off in its thinking has no text."""
    return Message("user", (Text(HEAD + (reply.text.strip() or reply.reasoning.strip())),))


class CompactedOut(Struct):
    """The reply to `/v1/responses/compact`."""

    id: str
    created_at: int
    output: list[CompactionOut]
    usage: UsageOut
    object: str = "response.compaction"


def compacted_body(request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
    """Returns the body of a reply that is not streamed."""
    writer = CompactionWriter(request)
    writer.write(started)
    writer.write(ended)
    if request.wire["compacts"] == "item":
        return encode(writer.response)
    response = writer.response
    return encode(CompactedOut(response.id, response.created_at, [writer.item], usage_out(ended.usage)))


class CompactionWriter(ResponsesWriter):
    """Writes the events of a compaction: its item is complete at the end, even if the summary was cut off."""

    item: CompactionOut

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request)
        self._last_event_at = 0.0

    def write(self, event: ReplyEvent) -> bytes:
        match event:
            case ReplyStarted():
                opening = super().write(event)
                self.item = CompactionOut(f"{ITEM_PREFIX}{self._handle}", self._handle)
                self._last_event_at = time.monotonic()
                return opening + self._start_item(self.item)
            case ReplyEnded():
                choice = msgspec.structs.replace(event.choices[0], finish="stop")
                end_response(self.response, choice, event.usage, [self.item])
                done = self._event("response.output_item.done", output_index=0, item=self.item)
                return done + self._lifecycle("response.completed")
        if time.monotonic() - self._last_event_at < SIGN_OF_LIFE_S:
            return b""
        self._last_event_at = time.monotonic()
        return self.keep_alive()
