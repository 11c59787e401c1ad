"""Compaction: a history is replaced by one item, which stands for a summary of it.

A request asks for it by a last item of type `compaction_trigger` (Codex since 0.16x), or by its path,
`/v1/responses/compact`, which is read as if it had that item. The policy's model samples the summary in the same
conversation, so that its prompt extends the recorded tokens. The reply is one `compaction` item; its
`encrypted_content` is the reply's handle. Sent back in `input`, the item becomes a user message with the summary, read
from the record.
"""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

from rolltap.proxy.conversation.chat import (
    ChatRequest,
    Message,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    Text,
    ToolChoice,
)
from rolltap.proxy.dialects.json_reply import encode
from rolltap.proxy.dialects.openai_responses_reply import (
    CompactionOut,
    ResponsesWriter,
    UsageOut,
    end_response,
    usage_out,
)

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
