"""Writes OpenAI Responses replies: as one body, or as numbered events from `response.created` to `response.completed`.

Items are in the order of sampling: reasoning (as one summary text), message, calls. An empty reply is a message without
text, so that the client has a turn to send back. `tools` and `instructions` can be large and are not echoed in the
response object.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from rolltap.protocols.contents import is_object
from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    ReasoningDelta,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from rolltap.protocols.openai_chat.wire import TokenLogprobOut
from rolltap.protocols.openai_chat.write import logprobs_out
from rolltap.protocols.openai_responses import wire
from rolltap.protocols.replies import EVENT_STREAM, encode, named_event

Status = Literal["in_progress", "completed", "incomplete"]


class SummaryText(Struct, tag_field="type", tag="summary_text"):
    text: str


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprobOut] = []


class ReasoningOut(Struct, tag_field="type", tag="reasoning"):
    id: str
    summary: list[SummaryText]
    encrypted_content: str | None


class MessageOut(Struct, tag_field="type", tag="message"):
    id: str
    status: Status
    content: list[OutputText]
    role: str = "assistant"


class FunctionCallOut(Struct, tag_field="type", tag="function_call", omit_defaults=True):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CustomCallOut(Struct, tag_field="type", tag="custom_tool_call", omit_defaults=True):
    id: str
    status: Status
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CompactionOut(Struct, tag_field="type", tag="compaction"):
    id: str
    encrypted_content: str


OutputItem = ReasoningOut | MessageOut | FunctionCallOut | CustomCallOut | CompactionOut


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct):
    reasoning_tokens: int


class UsageOut(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseOut(Struct):
    """The response object."""

    id: str
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    tool_choice: str | wire.WireChoice
    text: wire.TextConfig
    reasoning: wire.ReasoningConfig
    temperature: float | None
    top_p: float | None
    max_output_tokens: int | None
    top_logprobs: int
    previous_response_id: str | None
    prompt_cache_key: str | None
    store: bool
    metadata: dict[str, Any]
    object: str = "response"
    background: bool = False
    error: None = None
    incomplete_details: dict[str, str] | None = None
    instructions: None = None
    tools: list[Any] = []
    truncation: str = "disabled"
    usage: UsageOut | None = None


def response_out(request: ChatRequest, started: ReplyStarted) -> ResponseOut:
    """Returns the response object at the start of a reply."""
    head: wire.Head = request.wire["head"]
    return ResponseOut(
        id=f"resp_{started.handle or started.call_id}",
        created_at=started.created,
        status="in_progress",
        model=request.model,
        output=[],
        parallel_tool_calls=head.parallel_tool_calls is not False,
        tool_choice=head.tool_choice or "auto",
        text=head.text or wire.TextConfig(format=wire.TextFormat("text")),
        reasoning=head.reasoning or wire.ReasoningConfig(),
        temperature=head.temperature,
        top_p=head.top_p,
        max_output_tokens=head.max_output_tokens,
        top_logprobs=head.top_logprobs or 0,
        previous_response_id=head.previous_response_id,
        prompt_cache_key=head.prompt_cache_key,
        store=head.store is not False,
        metadata=head.metadata or {},
    )


def usage_out(usage: Usage) -> UsageOut:
    """Returns token counts in this protocol's form."""
    return UsageOut(
        input_tokens=usage.prompt,
        input_tokens_details=InputDetails(usage.cached, 0),
        output_tokens=usage.output,
        output_tokens_details=OutputDetails(usage.reasoning),
        total_tokens=usage.prompt + usage.output,
    )


def end_response(response: ResponseOut, choice: Choice, usage: Usage, output: list[OutputItem]) -> None:
    """Completes the response object. It is `incomplete` if the reply hit the token limit."""
    response.output = output
    response.usage = usage_out(usage)
    response.status = "incomplete" if choice.finish == "length" else "completed"
    if choice.finish == "length":
        response.incomplete_details = {"reason": "max_output_tokens"}


def response_body(request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
    """Returns the body of a reply that is not streamed."""
    writer = ResponsesWriter(request)
    writer.write(started)
    choice = ended.choices[0]
    if choice.message.reasoning:
        writer.write(ReasoningDelta(choice.message.reasoning))
    if choice.message.text:
        writer.write(TextDelta(choice.message.text))
    for position, call in enumerate(choice.message.tool_calls):
        writer.write(ToolCallStarted(position, call.id, call.name, call.kind))
        writer.write(ToolCallDelta(position, call.arguments))
        writer.write(ToolCallEnded(position))
    writer.write(ended)
    return encode(writer.response)


class ResponsesWriter:
    """Writes the events. At most one item is open at a time. `response` is the object in the last event."""

    content_type = EVENT_STREAM
    response: ResponseOut

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._namespaces: dict[str, tuple[str, str]] = request.wire["namespaces"]
        self._sequence = 0
        self._handle = ""
        self._done: list[OutputItem] = []
        self._open: OutputItem | None = None
        self._texts: list[str] = []  # the deltas of the open item

    def write(self, event: ReplyEvent) -> bytes:
        match event:
            case TextDelta(text):
                return self._text_delta(text)
            case ReasoningDelta(text):
                return self._reasoning_delta(text)
            case ToolCallDelta():
                return self._tool_delta(event.arguments)
            case ReplyStarted():
                self._handle = event.handle or event.call_id
                self.response = response_out(self._request, event)
                return self._lifecycle("response.created") + self._lifecycle("response.in_progress")
            case ToolCallStarted():
                return self._close("completed") + self._start_item(self._call_item(event))
            case ToolCallEnded():
                return self._close("completed")
            case ReplyEnded():
                choice = event.choices[0]
                events = b"" if self._done or self._open is not None else self._start_message()
                logprobs = logprobs_out(choice.logprobs)
                events += self._close(
                    "incomplete" if choice.finish == "length" else "completed",
                    logprobs.content if logprobs is not None else None,
                )
                end_response(self.response, choice, event.usage, self._done)
                return events + self._lifecycle(f"response.{self.response.status}")

    def keep_alive(self) -> bytes:
        """Returns a real event: comments don't reset Codex's idle timer."""
        return self._lifecycle("response.in_progress") if self._sequence else b""

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return named_event(kind, payload)

    def _lifecycle(self, kind: str) -> bytes:
        return self._event(kind, response=self.response)

    def _item_event(self, kind: str, item: OutputItem, **fields: Any) -> bytes:
        return self._event(kind, item_id=item.id, output_index=len(self._done), **fields)

    def _item_id(self, prefix: str) -> str:
        """Returns an item's id: its kind, a count if the reply has several of that kind, and the reply's handle."""
        count = sum(item.id.startswith(prefix) for item in self._done)
        return f"{prefix}{count or ''}_{self._handle}"

    def _start_item(self, item: OutputItem) -> bytes:
        self._open = item
        return self._event("response.output_item.added", output_index=len(self._done), item=item)

    def _reasoning_delta(self, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, ReasoningOut):
            events = self._close("completed")
            item = ReasoningOut(self._item_id("rs"), [], None)
            events += self._start_item(item)
            item.summary.append(SummaryText(""))
            events += self._item_event(
                "response.reasoning_summary_part.added", item, summary_index=0, part=item.summary[0]
            )
        item = self._open
        assert isinstance(item, ReasoningOut)
        self._texts.append(text)
        return events + self._item_event("response.reasoning_summary_text.delta", item, summary_index=0, delta=text)

    def _start_message(self) -> bytes:
        item = MessageOut(self._item_id("msg"), "in_progress", [])
        events = self._start_item(item)
        item.content.append(OutputText(""))
        return events + self._item_event("response.content_part.added", item, content_index=0, part=item.content[0])

    def _text_delta(self, text: str) -> bytes:
        events = b""
        if not isinstance(self._open, MessageOut):
            events = self._close("completed") + self._start_message()
        item = self._open
        assert isinstance(item, MessageOut)
        self._texts.append(text)
        return events + self._item_event("response.output_text.delta", item, content_index=0, delta=text, logprobs=[])

    def _call_item(self, event: ToolCallStarted) -> OutputItem:
        namespace, name = self._namespaces.get(event.name, (None, event.name))
        if event.kind == "custom":
            return CustomCallOut(f"ctc_{event.id}", "in_progress", event.id, name, "", namespace)
        return FunctionCallOut(f"fc_{event.id}", "in_progress", event.id, name, "", namespace)

    def _tool_delta(self, arguments: str) -> bytes:
        match self._open:
            case FunctionCallOut() as item:
                self._texts.append(arguments)
                return self._item_event("response.function_call_arguments.delta", item, delta=arguments)
            case CustomCallOut() as item:
                self._texts.append(arguments)
                return self._item_event("response.custom_tool_call_input.delta", item, delta=arguments)
        raise ValueError("a tool call's arguments came outside of a tool call")

    def _close(self, status: Status, logprobs: list[TokenLogprobOut] | None = None) -> bytes:
        """Returns the events that end the open item; empty if none is open."""
        item, text = self._open, "".join(self._texts)
        events = b""
        match item:
            case None:
                return b""
            case ReasoningOut():
                item.encrypted_content = self._handle  # even unrequested: some clients echo only items that have it
                part = item.summary[0]
                part.text = text
                events += self._item_event(
                    "response.reasoning_summary_text.done", item, summary_index=0, text=part.text
                )
                events += self._item_event("response.reasoning_summary_part.done", item, summary_index=0, part=part)
            case MessageOut():
                item.status = status
                part = item.content[0]
                part.text, part.logprobs = text, logprobs or []
                events += self._item_event(
                    "response.output_text.done", item, content_index=0, text=part.text, logprobs=part.logprobs
                )
                events += self._item_event("response.content_part.done", item, content_index=0, part=part)
            case FunctionCallOut():
                is_cut = bool(text.strip()) and not is_object(text)
                item.status, item.arguments = "incomplete" if is_cut else status, text
                events += self._item_event(
                    "response.function_call_arguments.done", item, name=item.name, arguments=item.arguments
                )
            case CustomCallOut():
                item.status, item.input = status, text
                events += self._item_event("response.custom_tool_call_input.done", item, input=item.input)
        events += self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open, self._texts = None, []
        return events
