"""Writes Gemini replies: as one body, or as server-sent chunks of the same object; also errors.

Thoughts are sent only with `includeThoughts`. The signature is on the first function call; without one, on the last
text part, which is empty in a stream. A call's part is delayed until something follows it, so that the last one has the
finish reason, as Google sends it. The stream has no comments: the Gemini CLI crashes on them.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from rolltap.errors import ContextOverflow, RateLimited, RolltapError
from rolltap.protocols.base import WireReply
from rolltap.protocols.contents import UnparsedWrapper, object_of
from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    ReasoningDelta,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    TextDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from rolltap.protocols.replies import DEFAULT_RETRY_S, EVENT_STREAM, encode, error_reply, unnamed_event

_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    504: "DEADLINE_EXCEEDED",
}


class FunctionCallOut(Struct):
    id: str
    name: str
    args: msgspec.Raw | UnparsedWrapper


class PartOut(Struct, rename="camel", omit_defaults=True):
    text: str | None = None
    thought: bool = False
    function_call: FunctionCallOut | None = None
    thought_signature: str | None = None


class ContentOut(Struct):
    parts: list[PartOut]
    role: str = "model"


class CandidateOut(Struct, rename="camel", omit_defaults=True):
    content: ContentOut
    finish_reason: str | None = None
    index: int | UnsetType = UNSET
    avg_logprobs: float | None = None
    logprobs_result: dict[str, Any] | None = None


class UsageOut(Struct, rename="camel", omit_defaults=True):
    prompt_token_count: int
    candidates_token_count: int | UnsetType = UNSET
    total_token_count: int | UnsetType = UNSET
    thoughts_token_count: int = 0
    cached_content_token_count: int = 0


class ResponseOut(Struct, rename="camel"):
    candidates: list[CandidateOut]
    usage_metadata: UsageOut
    model_version: str
    response_id: str


def response_body(request: ChatRequest, started: ReplyStarted, ended: ReplyEnded) -> bytes:
    """Returns the body of a reply that is not streamed."""
    signature = _signature(started)
    candidates = []
    for choice in ended.choices:
        parts: list[PartOut] = []
        if choice.message.reasoning and request.wire["thoughts"]:
            parts.append(PartOut(choice.message.reasoning, thought=True))
        if choice.message.text:
            parts.append(PartOut(choice.message.text))
        calls = [_call_part(call) for call in choice.message.tool_calls]
        parts += calls
        signed_part = calls[0] if calls else parts[-1] if parts and not parts[-1].thought else None
        if signed_part is None:
            parts.append(signed_part := PartOut(""))
        signed_part.thought_signature = signature
        candidates.append(_candidate(choice, parts))
    return encode(ResponseOut(candidates, usage_out(ended.usage), request.model, started.handle or started.call_id))


def _candidate(choice: Choice, parts: list[PartOut]) -> CandidateOut:
    reason = "MAX_TOKENS" if choice.finish == "length" else "STOP"
    candidate = CandidateOut(ContentOut(parts), reason, choice.index)
    if choice.logprobs is not None:
        sampled_tokens = [_token_logprob(entry.token, entry.logprob) for entry in choice.logprobs]
        candidate.avg_logprobs = sum(entry.logprob for entry in choice.logprobs) / max(len(sampled_tokens), 1)
        tops = [{"candidates": [_token_logprob(*one) for one in entry.top]} for entry in choice.logprobs]
        candidate.logprobs_result = {"chosenCandidates": sampled_tokens, "topCandidates": tops}
    return candidate


def _token_logprob(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logProbability": logprob}


def _call_part(call: ToolCall) -> PartOut:
    return PartOut(function_call=FunctionCallOut(call.id, call.name, object_of(call.arguments)))


def _signature(started: ReplyStarted) -> str:
    """Returns the handle in base64, which a signature must be."""
    return base64.b64encode((started.handle or started.call_id).encode()).decode()


def usage_out(usage: Usage) -> UsageOut:
    """Returns token counts in Google's form: the candidates' count excludes thoughts."""
    return UsageOut(
        prompt_token_count=usage.prompt,
        candidates_token_count=usage.output - usage.reasoning,
        total_token_count=usage.prompt + usage.output,
        thoughts_token_count=usage.reasoning,
        cached_content_token_count=usage.cached,
    )


class GeminiWriter:
    """Writes the chunks. Each choice has its own delayed call and its own signature."""

    content_type = EVENT_STREAM

    def __init__(self, request: ChatRequest) -> None:
        self._model = request.model
        self._thoughts: bool = request.wire["thoughts"]
        self._signature = ""
        self._id = ""
        self._usage = UsageOut(0)
        self._calls: dict[tuple[int, int], tuple[ToolCallStarted, list[str]]] = {}
        self._delayed_calls: dict[int, PartOut] = {}
        self._signed_choices: set[int] = set()

    def write(self, event: ReplyEvent) -> bytes:
        match event:
            case TextDelta(text, index):
                return self._part(index, PartOut(text))
            case ReasoningDelta(text, index):
                return self._part(index, PartOut(text, thought=True)) if self._thoughts else b""
            case ReplyStarted():
                self._signature, self._id = _signature(event), event.handle or event.call_id
                self._usage = UsageOut(event.prompt_tokens, 0, event.prompt_tokens)
                return b""
            case ToolCallStarted():
                self._calls[event.index, event.position] = (event, [])
                return b""
            case ToolCallDelta():
                self._calls[event.index, event.position][1].append(event.arguments)
                return b""
            case ToolCallEnded():
                return self._call(event)
            case ReplyEnded():
                return self._ended(event)

    def keep_alive(self) -> bytes:
        return b""

    def _call(self, event: ToolCallEnded) -> bytes:
        started, texts = self._calls.pop((event.index, event.position))
        part = _call_part(ToolCall(started.id, started.name, "".join(texts)))
        if event.index not in self._signed_choices:
            part.thought_signature = self._signature
            self._signed_choices.add(event.index)
        earlier = self._flush(event.index)
        self._delayed_calls[event.index] = part
        return earlier

    def _part(self, index: int, part: PartOut) -> bytes:
        return self._flush(index) + self._chunk([CandidateOut(ContentOut([part]), index=index)])

    def _flush(self, index: int) -> bytes:
        part = self._delayed_calls.pop(index, None)
        return b"" if part is None else self._chunk([CandidateOut(ContentOut([part]), index=index)])

    def _ended(self, event: ReplyEnded) -> bytes:
        self._usage = usage_out(event.usage)
        candidates = []
        for choice in event.choices:
            part = self._delayed_calls.pop(choice.index, None)
            if part is None:
                is_signed = choice.index in self._signed_choices
                part = PartOut("", thought_signature=None if is_signed else self._signature)
            candidates.append(_candidate(choice, [part]))
        return self._chunk(candidates)

    def _chunk(self, candidates: list[CandidateOut]) -> bytes:
        return unnamed_event(ResponseOut(candidates, self._usage, self._model, self._id))


def gemini_error(error: RolltapError) -> WireReply:
    """`{"error": {"code", "message", "status", "details"}}`."""
    status = _STATUSES.get(error.status, "INVALID_ARGUMENT" if error.status < 500 else "UNAVAILABLE")
    message = error.message
    if isinstance(error, ContextOverflow):
        tokens, limit = (f" ({count})" if count is not None else "" for count in (error.tokens, error.limit))
        message = f"The input token count{tokens} exceeds the maximum number of tokens allowed{limit}."
    details: list[dict[str, Any]] = []
    if error.param is not None:
        violation = {"field": error.param, "description": error.message}
        details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
    if isinstance(error, RateLimited):
        delay = f"{math.ceil(error.retry_after or DEFAULT_RETRY_S)}s"
        details.append({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": delay})
    body = {"code": error.status, "message": message, "status": status, "details": details}
    return error_reply(error, {"error": body})
