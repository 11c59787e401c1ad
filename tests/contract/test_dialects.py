"""What every dialect promises, over the registry: one conversation, one reply, one set of errors.

The golden files hold a request of each dialect that says the same (`conversation.<dialect>.json`, written by hand) and
what is written for one scripted reply (`reply.<dialect>.json`, `stream.<dialect>.sse`). `UPDATE_GOLDEN=1 pytest
tests/contract/test_dialects.py` writes the latter for a new dialect, or after a deliberate change of a wire form, to be
read in the diff. The files of another package's dialect are in `golden/` beside its module.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from rolltap.errors import (
    BodyTooLarge,
    ContextOverflow,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    Forbidden,
    InvalidRequest,
    LeaseLost,
    NotFound,
    RateLimited,
    RolltapError,
    SessionClosed,
    StoreUnavailable,
    Unauthenticated,
)
from rolltap.protocols.base import Dialect, WireRequest
from rolltap.protocols.conversation import (
    TOOL_ERROR,
    ChatRequest,
    Choice,
    Message,
    Reasoning,
    ReasoningDelta,
    ReplyEnded,
    ReplyEvent,
    ReplyStarted,
    Text,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from rolltap.proxy.continuation.canonical import canonical_arguments, message_digest
from tests.dialects import DIALECTS

from .dialect_world import check_golden, conversation, stream_request

PROMPTS_ONLY = {"openai_completions"}
"""Dialects that have no history: their conversation is its first question."""

CHAT = [name for name in DIALECTS if name not in PROMPTS_ONLY]

CALL_ID = "01jd0000000000000001"
HANDLE = f"call_{CALL_ID}zzabcdefghjkmn"
FIRST, SECOND = f"call_{CALL_ID}00pqrstvwxyz01", f"call_{CALL_ID}01pqrstvwxyz02"
STARTED = ReplyStarted(CALL_ID, 1_700_000_000, "gardener", 40, HANDLE)
REPLY = Message(
    "assistant",
    (Reasoning("Write, then\nclose."), Text("Noted: 三 radishes.")),
    (ToolCall(FIRST, "look", '{"place": "shed"}'), ToolCall(SECOND, "look", "{}")),
    handle=HANDLE,
)
LOGPROBS = (TokenLogprob("Noted", -0.25, (("Noted", -0.25), ("Not", -1.5))), TokenLogprob(":", -0.5))
ENDED = ReplyEnded(
    (Choice(REPLY, "tool_calls", logprobs=LOGPROBS),), Usage(prompt=40, output=12, cached=30, reasoning=5)
)
EVENTS: list[ReplyEvent] = [
    STARTED,
    ReasoningDelta("Write, "),
    ReasoningDelta("then\nclose."),
    TextDelta("Noted: "),
    TextDelta("三 radishes."),
    ToolCallStarted(0, FIRST, "look"),
    ToolCallDelta(0, '{"place": '),
    ToolCallDelta(0, '"shed"}'),
    ToolCallEnded(0),
    ToolCallStarted(1, SECOND, "look"),
    ToolCallDelta(1, "{}"),
    ToolCallEnded(1),
    ENDED,
]


def request(name: str, body: bytes | None = None) -> WireRequest:
    """A request of the dialect: the golden conversation, or another body."""
    return stream_request(name, conversation(name) if body is None else body)


def parsed(name: str) -> ChatRequest:
    return DIALECTS[name].parse(request(name))


def meaning(message: Message) -> tuple[Any, ...]:
    """What must not depend on the protocol. Only some can mark a tool's failure."""
    return (
        "system" if message.role == "developer" else message.role,
        message.text.removeprefix(f"{TOOL_ERROR}\n"),
        message.reasoning,
        [part for part in message.parts if not isinstance(part, Text | Reasoning)],
        [(call.id, call.name, canonical_arguments(call.arguments), call.kind) for call in message.tool_calls],
        message.tool_call_id,
        message.name,
    )


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


@pytest.mark.parametrize("name", CHAT)
def test_the_same_conversation_is_the_same_messages_in_every_dialect(name: str) -> None:
    reference, other = parsed("openai_chat"), parsed(name)
    assert [meaning(message) for message in other.messages] == [meaning(message) for message in reference.messages]
    plain = [[replace(m, is_error=False) for m in chat.messages] for chat in (other, reference)]
    assert [message_digest(m) for m in plain[0]] == [message_digest(m) for m in plain[1]]
    assert other.tools == reference.tools
    assert other.tool_choice == reference.tool_choice
    assert (other.model, other.stream) == ("gardener", True)
    assert other.sampling.temperature == 0.5
    assert other.sampling.max_tokens == 256


@pytest.mark.parametrize("name", CHAT)
def test_what_the_client_echoes_names_the_recorded_call(name: str) -> None:
    turn = next(message for message in parsed(name).messages if message.role == "assistant")
    handles = [turn.handle, *(part.handle for part in turn.parts if isinstance(part, Reasoning))]
    echoed = [*handles, *(call.id for call in turn.tool_calls)]
    assert any("call_01jd0000000000000000" in (handle or "") for handle in echoed)


@pytest.mark.parametrize("name", ["openai_responses", "anthropic", "gemini"])
def test_a_turn_without_tool_calls_has_a_handle_too(name: str) -> None:
    turn = next(message for message in parsed(name).messages if message.role == "assistant")
    handles = [turn.handle, *(part.handle for part in turn.parts if isinstance(part, Reasoning))]
    assert any("call_01jd0000000000000000zzabcdefghjkmn" in (handle or "") for handle in handles)


def test_history_items_are_the_bytes_that_came(dialect: Dialect) -> None:
    wire = request(dialect.name)
    chat = dialect.parse(wire)
    assert chat.items
    assert all(item in wire.body for item in chat.items)
    assert all(part in wire.body for part in chat.fixed.values())
    kept = json.loads(wire.body).keys() - chat.fixed.keys() - {dialect.items_field}
    assert kept <= json.loads(chat.head).keys()


@pytest.mark.parametrize("name", CHAT)
def test_a_repeated_history_is_the_same_objects(name: str) -> None:
    first, again = parsed(name), parsed(name)
    assert all(a is b for a, b in zip(first.messages, again.messages, strict=True))
    assert all(a is b for a, b in zip(first.items, again.items, strict=True))
    assert all(a is b for a, b in zip(first.tools, again.tools, strict=True))


def test_a_recorded_request_can_be_read_again(dialect: Dialect) -> None:
    chat = dialect.parse(request(dialect.name))
    again = dialect.parse_recorded(chat.head, chat.items, chat.fixed)
    assert again.model == chat.model
    assert again.messages == chat.messages
    assert again.tools == chat.tools
    assert again.sampling == chat.sampling


def test_a_whole_reply_is_the_golden_one(dialect: Dialect) -> None:
    body = dialect.reply(dialect.parse(request(dialect.name)), STARTED, ENDED)
    pretty = json.dumps(json.loads(body), indent=1, ensure_ascii=False).encode() + b"\n"
    check_golden(dialect.name, f"reply.{dialect.name}.json", pretty)


def test_a_streamed_reply_is_the_golden_one(dialect: Dialect) -> None:
    writer = dialect.writer(dialect.parse(request(dialect.name)))
    assert writer.content_type.startswith("text/event-stream")
    check_golden(dialect.name, f"stream.{dialect.name}.sse", b"".join(writer.write(event) for event in EVENTS))


def test_nothing_that_ends_a_stream_comes_before_its_end(dialect: Dialect) -> None:
    """The terminal event is withheld until the call is durable; what comes before must not look final."""
    writer = dialect.writer(dialect.parse(request(dialect.name)))
    before = b"".join(writer.write(event) for event in EVENTS[:-1])
    for final in (b"[DONE]", b"response.completed", b"message_stop", b"message_delta", b'"finishReason"', b'"usage":{'):
        if final == b'"usage":{' and dialect.name == "anthropic":
            continue  # message_start has the prompt's count
        assert final not in before
    for choice in [json.loads(line[6:]) for line in before.splitlines() if line.startswith(b"data: {")]:
        assert all(entry.get("finish_reason") is None for entry in choice.get("choices", []))


def test_keep_alives_do_not_change_what_is_read(dialect: Dialect) -> None:
    def read(data: bytes) -> list[Any]:
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        ignored = ("response.in_progress", "ping")
        kept = [event for event in events if event.get("type") not in ignored]
        for event in kept:
            event.pop("sequence_number", None)
        return kept

    plain, patient = (dialect.writer(dialect.parse(request(dialect.name))) for _ in range(2))
    straight = b"".join(plain.write(event) for event in EVENTS)
    waiting = b"".join(patient.keep_alive() + patient.write(event) for event in EVENTS)
    assert read(waiting) == read(straight)


SEPARATORS = [chr(code) for code in (0x0B, 0x0C, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029)]
"""The characters besides CR and LF that `str.splitlines` splits at."""


def test_no_text_of_a_reply_ends_a_line_of_its_stream(dialect: Dialect) -> None:
    """Clients that split lines as Python's `str.splitlines` does read every event; and they read what was sampled."""
    text = "".join(f"{character}{number}三" for number, character in enumerate(SEPARATORS))
    arguments = json.dumps({"place" + text: text}, ensure_ascii=False)
    message = Message("assistant", (Reasoning(text), Text(text)), (ToolCall(FIRST, "look", arguments),), handle=HANDLE)
    logprobs = (TokenLogprob(text, -0.25, ((text, -0.25),)),)
    events: list[ReplyEvent] = [
        STARTED,
        ReasoningDelta(text),
        TextDelta(text),
        ToolCallStarted(0, FIRST, "look"),
        ToolCallDelta(0, arguments),
        ToolCallEnded(0),
        ReplyEnded((Choice(message, "tool_calls", logprobs=logprobs),), Usage(prompt=40, output=12)),
    ]
    writer = dialect.writer(dialect.parse(request(dialect.name)))
    stream = b"".join(writer.write(event) for event in events).decode()
    assert [line for line in stream.splitlines() if line] == [line for line in stream.split("\n") if line]
    bodies = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    texts = set(_strings(bodies))
    assert text in texts
    if dialect.name not in PROMPTS_ONLY:
        assert {arguments, "place" + text} & texts


def _strings(value: Any) -> list[str]:
    """All strings in a JSON value, keys too."""
    match value:
        case str():
            return [value]
        case list():
            return [text for item in value for text in _strings(item)]
        case dict():
            return [text for item in value.items() for text in _strings(list(item))]
    return []


@pytest.mark.parametrize("name", ["openai_chat", "openai_responses"])
def test_log_probs_have_the_tokens_own_bytes(name: str) -> None:
    """A token may be a part of a character: its text is no text then, its bytes are."""
    halves = ("三".encode()[:2], "三".encode()[2:])
    entries = tuple(TokenLogprob("\ufffd", -0.5, bytes=half) for half in halves)
    ended = ReplyEnded((Choice(Message("assistant", (Text("三"),)), "stop", logprobs=entries),), Usage(1, 2))
    body = json.loads(DIALECTS[name].reply(parsed(name), STARTED, ended))
    if name == "openai_chat":
        content = body["choices"][0]["logprobs"]["content"]
    else:
        writer = DIALECTS[name].writer(parsed(name))
        stream = b"".join(writer.write(event) for event in (STARTED, TextDelta("三"), ended)).decode()
        final = json.loads([line for line in stream.splitlines() if line.startswith("data: {")][-1][6:])
        content = final["response"]["output"][0]["content"][0]["logprobs"]
        assert body["output"][0]["content"][0]["logprobs"] == content
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "三"


def test_gemini_never_writes_a_comment() -> None:
    writer = DIALECTS["gemini"].writer(parsed("gemini"))
    data = b"".join(writer.keep_alive() + writer.write(event) for event in EVENTS)
    assert not any(line.startswith(b":") for line in data.splitlines())


ERRORS = [
    (InvalidRequest("messages[0].role: what?", param="messages[0].role"), 400),
    (Unauthenticated("no key"), 401),
    (Forbidden("not yours"), 403),
    (NotFound("no such model", param="model"), 404),
    (SessionClosed("closed"), 409),
    (BodyTooLarge("too large"), 413),
    (ContextOverflow("too long", tokens=900, limit=512), 400),
    (RateLimited("slow down"), 429),
    (RateLimited("slow down", retry_after=2.5), 429),
    (EngineError("broken"), 502),
    (EngineUnavailable("away"), 503),
    (EngineTimeout("late"), 504),
    (StoreUnavailable("away", retry_after=7), 503),
    (RolltapError("a bug"), 500),
]


@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: getattr(value, "code", value))
def test_an_error_has_its_status_and_says_what_is_wrong(dialect: Dialect, error: RolltapError, status: int) -> None:
    reply = dialect.error(error)
    body = json.loads(reply.body)["error"]
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert body["message"]
    if isinstance(error, ContextOverflow):
        assert "900" in body["message"]
        assert "512" in body["message"]
    else:
        assert body["message"] == error.message
    if status == 429:
        assert int(reply.headers["retry-after"]) >= (error.retry_after or 1)


@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: getattr(value, "code", value))
def test_clients_are_told_not_to_repeat_a_final_refusal(dialect: Dialect, error: RolltapError, status: int) -> None:
    told = dialect.error(error).headers.get("x-should-retry")
    assert told == ("false" if status in (401, 403, 404, 409) else None)


def test_a_conflict_that_may_pass_is_worth_a_retry(dialect: Dialect) -> None:
    assert "x-should-retry" not in dialect.error(LeaseLost("another trainer's")).headers


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: getattr(value, "code", value))
def test_errors_have_the_vendors_shape(name: str, error: RolltapError, status: int) -> None:
    reply = DIALECTS[name].error(error)
    body = json.loads(reply.body)["error"]
    if name == "anthropic":
        assert json.loads(reply.body)["type"] == "error"
        assert body["type"].endswith("error") or body["type"] == "request_too_large"
    elif name == "gemini":
        assert body["code"] == status
        assert body["status"].isupper()
    else:
        assert body.keys() == {"message", "type", "param", "code"}
        assert body["param"] == error.param or isinstance(error, ContextOverflow)


BAD_BODIES = {
    "empty": b"",
    "not json": b"{",
    "a list": b"[]",
    "a number": b"7",
    "no fields": b"{}",
    "bytes that are not text": b'{"model": "\xff"}',
    "lone surrogate": b'{"model": "m\\ud800", "messages": []}',
    "ten thousand deep": b'{"model":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "nine hundred deep": b'{"model":' + b"[" * 900 + b"]" * 900 + b"}",
    "an endless number": b'{"model": "m", "temperature": 1e999}',
    "a byte-order mark": b"\xef\xbb\xbf{}",
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_body_that_is_no_request_is_refused(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(InvalidRequest) as raised:
        dialect.parse(request(dialect.name, body))
    assert dialect.error(raised.value).status == 400


def test_a_field_that_nobody_knows_is_refused_by_name(dialect: Dialect) -> None:
    body = json.loads(request(dialect.name).body) | {"api_base": "http://elsewhere"}
    with pytest.raises(InvalidRequest, match="api_base") as raised:
        dialect.parse(request(dialect.name, json.dumps(body).encode()))
    assert raised.value.param == "api_base"


def test_models_are_listed_and_found(dialect: Dialect) -> None:
    listed = json.loads(dialect.models(["gardener", "judge"], None))
    entries = listed.get("data") or listed["models"]
    assert [(entry.get("id") or entry["name"]).removeprefix("models/") for entry in entries] == ["gardener", "judge"]
    assert b"judge" in dialect.models(["gardener", "judge"], "judge")
    with pytest.raises(NotFound, match="served: gardener, judge"):
        dialect.models(["gardener", "judge"], "cook")


def test_routes_do_not_collide() -> None:
    routes = [(route.method, route.path) for dialect in DIALECTS.values() for route in dialect.routes]
    assert len(set(routes)) == len(routes)


def test_the_key_is_read_from_where_the_protocol_puts_it() -> None:
    def key(name: str, headers: dict[str, str], query: dict[str, str] | None = None) -> str | None:
        return DIALECTS[name].key(WireRequest("/", {}, query or {}, headers, b""))

    for name in DIALECTS:
        assert key(name, {"authorization": "Bearer sk-1"}) == "sk-1"
        assert key(name, {"authorization": "Basic sk-1"}) is None
        assert key(name, {}) is None
    assert key("anthropic", {"x-api-key": "sk-2"}) == "sk-2"
    assert key("gemini", {"x-goog-api-key": "sk-3"}) == "sk-3"
    assert key("gemini", {}, {"key": "sk-4"}) == "sk-4"


def test_counted_tokens_have_a_form_where_there_is_a_route_for_it() -> None:
    assert json.loads(DIALECTS["anthropic"].token_count(7)) == {"input_tokens": 7}
    assert json.loads(DIALECTS["gemini"].token_count(7)) == {"totalTokens": 7}


def test_a_request_is_immutable() -> None:
    with pytest.raises(AttributeError):
        parsed("openai_chat").model = "other"  # type: ignore[misc]
    assert msgspec.structs.replace(parsed("openai_chat"), model="other").model == "other"
