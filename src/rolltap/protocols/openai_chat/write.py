"""Writes OpenAI Chat Completions replies: as one body, or as `chat.completion.chunk` events that end with `[DONE]`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    ReasoningDelta,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from rolltap.protocols.openai_chat import wire
from rolltap.protocols.replies import COMMENT, EVENT_STREAM, encode, encode_line, unnamed_event

DONE = b"data: [DONE]\n\n"
PLACE = "text"


def completion(request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
    """Returns the body of a reply that is not streamed."""
    return encode(
        wire.Completion(
            id=f"chatcmpl-{started.call_id}",
            created=started.created,
            model=request.model,
            choices=[_choice(choice, request.wire["hides_thinking"]) for choice in ended.choices],
            usage=usage_out(ended.usage),
        )
    )


def _choice(choice: Choice, hides_thinking: bool) -> wire.ChoiceOut:
    message = choice.message
    return wire.ChoiceOut(
        index=choice.index,
        message=wire.MessageOut(
            role="assistant",
            content=message.text or (None if message.tool_calls else ""),
            refusal=None,
            reasoning_content=None if hides_thinking else message.reasoning or None,
            tool_calls=[_tool_call(call) for call in message.tool_calls] or None,
        ),
        finish_reason=choice.finish,
        logprobs=logprobs_out(choice.logprobs),
    )


def _tool_call(call: ToolCall) -> wire.ToolCallOut:
    if call.kind == "custom":
        return wire.ToolCallOut(id=call.id, type="custom", custom=wire.CustomOut(call.arguments, call.name))
    return wire.ToolCallOut(id=call.id, type="function", function=wire.FunctionOut(call.arguments, call.name))


def usage_out(usage: Usage) -> wire.UsageOut:
    """Returns token counts in OpenAI's form: the prompt's count includes cached tokens."""
    return wire.UsageOut(
        prompt_tokens=usage.prompt,
        completion_tokens=usage.output,
        total_tokens=usage.prompt + usage.output,
        prompt_tokens_details=wire.PromptDetails(usage.cached),
        completion_tokens_details=wire.OutputDetails(usage.reasoning),
    )


def logprobs_out(logprobs: Sequence[TokenLogprob] | None) -> wire.LogprobsOut | None:
    """Returns the log-probs of the sampled tokens; None if they were not requested."""
    if logprobs is None:
        return None
    return wire.LogprobsOut(
        [
            wire.TokenLogprobOut(
                entry.token,
                entry.logprob,
                _bytes(entry.token) if entry.bytes is None else list(entry.bytes),
                [wire.TopLogprobOut(token, value, _bytes(token)) for token, value in entry.top],
            )
            for entry in logprobs
        ]
    )


def _bytes(token: str) -> list[int]:
    return list(token.encode("utf-8", "replace"))


class ChatWriter:
    """Writes chunks: the role first, then deltas, the finish of each choice, usage if requested, `[DONE]`.

    Log-probs are in the chunk that ends their choice.
    """

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest) -> None:
        self._n = request.sampling.n
        self._usage: bool = request.wire["include_usage"]
        self._hides_thinking: bool = request.wire["hides_thinking"]
        self._model = request.model
        self._id = ""
        self._created = 0
        self._kinds: dict[tuple[int, int], str] = {}
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # by choice: what comes before and after a delta's text

    def write(self, event: ReplyEvent) -> bytes:
        match event:
            case TextDelta(text, index):
                return self._text(index, text)
            case ReasoningDelta() if self._hides_thinking:
                return COMMENT  # so that the client doesn't take thinking for silence
            case ReasoningDelta(text, index):
                return self._delta(index, wire.Delta(reasoning_content=text))
            case ReplyStarted():
                self._id, self._created = f"chatcmpl-{event.call_id}", event.created
                return b"".join(self._delta(i, wire.Delta(role="assistant", content="")) for i in range(self._n))
            case ToolCallStarted():
                return self._tool_started(event)
            case ToolCallDelta():
                return self._tool_delta(event)
            case ToolCallEnded():
                return b""
            case ReplyEnded():
                return self._ended(event)

    def keep_alive(self) -> bytes:
        return COMMENT

    def _tool_started(self, event: ToolCallStarted) -> bytes:
        self._kinds[event.index, event.position] = event.kind
        call = wire.ToolCallOut(index=event.position, id=event.id, type=event.kind)
        if event.kind == "custom":
            call.custom = wire.CustomOut("", event.name)
        else:
            call.function = wire.FunctionOut("", event.name)
        return self._delta(event.index, wire.Delta(tool_calls=[call]))

    def _tool_delta(self, event: ToolCallDelta) -> bytes:
        call = wire.ToolCallOut(index=event.position)
        if self._kinds[event.index, event.position] == "custom":
            call.custom = wire.CustomOut(event.arguments)
        else:
            call.function = wire.FunctionOut(event.arguments)
        return self._delta(event.index, wire.Delta(tool_calls=[call]))

    def _ended(self, event: ReplyEnded) -> bytes:
        chunks = [
            self._chunk([wire.ChunkChoice(choice.index, wire.Delta(), choice.finish, logprobs_out(choice.logprobs))])
            for choice in event.choices
        ]
        if self._usage:
            chunks.append(self._chunk([], usage_out(event.usage)))
        return b"".join([*chunks, DONE])

    def _text(self, index: int, text: str) -> bytes:
        """A delta of text. Nearly all events are: only their text is encoded."""
        around = self._around_text.get(index)
        if around is None:
            # The model's name, which may hold anything, is before the text.
            before, _, after = self._delta(index, wire.Delta(content=PLACE)).rpartition(encode_line(PLACE))
            around = self._around_text[index] = before, after
        return around[0] + encode_line(text) + around[1]

    def _delta(self, index: int, delta: wire.Delta) -> bytes:
        return self._chunk([wire.ChunkChoice(index, delta)])

    def _chunk(self, choices: list[wire.ChunkChoice], usage: wire.UsageOut | None = None) -> bytes:
        """Returns a chunk. If usage was requested, every chunk has the field; it is null in all but the last."""
        usage_field = usage if self._usage else msgspec.UNSET
        return unnamed_event(
            wire.Chunk(self._id, "chat.completion.chunk", self._created, self._model, choices, usage_field)
        )
