"""Chat upstreams as they are: streams that deviate from OpenAI's types in ways that known servers do.

Every deviation changes how a reply is written and not what it says. So the message is the same, streamed or whole, and
what the client gets event by event is that message too. Token ids count only where they cover the reply.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from rolltap.errors import EngineProtocolError, EngineUnavailable
from rolltap.protocols.conversation import (
    ChatRequest,
    Choice,
    Message,
    ReasoningDelta,
    ReplyEvent,
    Sampling,
    Text,
    TextDelta,
    ToolCallDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from rolltap.protocols.openai_chat.read import ChatReader
from rolltap.proxy.call.sources.chat import ChatReplyParser
from rolltap.proxy.engines.base import ChatCall, ChatChunk
from rolltap.proxy.engines.registry import open_chat_engine
from rolltap.settings import EngineSettings

from .engine_world import collect


@dataclass
class Upstream:
    """A server that answers every chat request with the same bytes."""

    answer: bytes = b""
    content_type: str = "text/event-stream"
    url: str = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.split("content-length:")[1].split("\r\n")[0]))
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {self.content_type}\r\nconnection: close\r\n\r\n".encode())
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    served = Upstream()
    server = await asyncio.start_server(served.handle, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield served


@dataclass
class Reading:
    """A reply as the proxy has it: its events, its message, and the upstream's chunks."""

    events: list[ReplyEvent]
    choice: Choice
    chunks: list[ChatChunk]
    parser: ChatReplyParser

    @property
    def message(self) -> tuple[str, str, list[tuple[str, Any]]]:
        return meaning(self.choice.message)

    @property
    def last(self) -> ChatChunk:
        return self.chunks[-1]


def meaning(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    return message.reasoning, message.text, [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


async def read(served: Upstream, answer: bytes, content_type: str = "text/event-stream") -> Reading:
    served.answer, served.content_type = answer, content_type
    engine = open_chat_engine("up", EngineSettings.model_validate({"kind": "openai_compatible", "url": served.url}))
    chat = ChatRequest("openai_chat", "m", (Message("user", (Text("hello"),)),))
    parser = ChatReplyParser(chat, "call_{}".format, 0)
    events: list[ReplyEvent] = []
    try:
        chunks = await collect(engine.chat, ChatCall("call", "m", chat, Sampling()))
    finally:
        await engine.close()
    for chunk in chunks:
        events += parser.feed(chunk)
    last, choice = parser.finish(chunks[-1].finish or "stop")
    return Reading([*events, *last], choice, chunks, parser)


def as_client(events: list[ReplyEvent]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What a client reads from the events, which allow one open call at a time."""
    thinking, text, open_call = "", "", None
    calls: list[tuple[str, str]] = []
    for event in events:
        match event:
            case ReasoningDelta(piece):
                assert open_call is None
                thinking += piece
            case TextDelta(piece):
                assert open_call is None
                text += piece
            case ToolCallStarted():
                assert open_call is None
                assert event.position == len(calls)
                open_call = event.position
                calls.append((event.name, ""))
            case ToolCallDelta():
                assert event.position == open_call
                calls[-1] = (calls[-1][0], calls[-1][1] + event.arguments)
            case ToolCallEnded():
                assert event.position == open_call
                open_call = None
            case _:
                raise AssertionError(event)
    assert open_call is None
    return thinking, text, [(name, json.loads(arguments)) for name, arguments in calls]


def sse(*payloads: Any, done: bytes = b"data: [DONE]\n\n") -> bytes:
    return b"".join(b"data: " + json.dumps(payload).encode() + b"\n\n" for payload in payloads) + done


def chunk(delta: Any, finish: Any = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **fields}


def call(name: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}


LS, PWD = ("bash", {"command": "ls"}), ("bash", {"command": "pwd"})
LS_TEXT, PWD_TEXT = '{"command": "ls"}', '{"command": "pwd"}'

KNOWN = {
    "ollama: all calls have index 0, whole arguments, finish stop, empty content": sse(
        chunk({"role": "assistant", "content": "", "tool_calls": [call("bash", LS_TEXT, index=0, id="call_a")]}),
        chunk({"role": "assistant", "content": "", "tool_calls": [call("bash", PWD_TEXT, index=0, id="call_b")]}),
        chunk({"role": "assistant", "content": ""}, "stop"),
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}},
    ),
    "ollama: finish_reason is an empty text until the end": sse(
        chunk({"role": "assistant", "content": ""}, ""),
        chunk({"tool_calls": [call("bash", LS_TEXT, index=0, id="a"), call("bash", PWD_TEXT, index=1, id="b")]}, ""),
        chunk({"content": ""}, "tool_calls"),
    ),
    "gemini: no index, calls in one delta, no id, usage in every chunk, upper case": sse(
        chunk(
            {"role": "assistant", "tool_calls": [call("bash", LS_TEXT, id=""), call("bash", PWD_TEXT, id="")]},
            "STOP",
            usage={"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12},
        ),
    ),
    "gemini: index 0 with other ids and extra content": sse(
        chunk({"tool_calls": [call("bash", LS_TEXT, index=0, id="f-1", extra_content={"google": {"x": "y"}})]}),
        chunk({"tool_calls": [call("bash", PWD_TEXT, index=0, id="f-2")]}, "stop"),
    ),
    "llama.cpp: null content and deltas, arguments in pieces, timings, no role": sse(
        chunk({"content": None, "tool_calls": [call("bash", '{"comm', index=0, id="x")]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": 'and": "ls"}'}}]}),
        chunk({"tool_calls": [call("bash", "", index=1, id="y")]}),
        chunk({"tool_calls": [{"index": 1, "function": {"arguments": PWD_TEXT}}]}),
        {"choices": [{"index": 0, "delta": None, "finish_reason": None}]},
        chunk({}, "tool_calls", timings={"predicted_n": 9}),
    ),
    "lm studio: [DONE] without a space and CRLF, id on every piece, arguments as an object": (
        sse(
            chunk({"role": "assistant", "tool_calls": [call("bash", {"command": "ls"}, index=0, id="1")]}),
            chunk({"tool_calls": [call("bash", "", index=1, id="2")]}),
            chunk({"tool_calls": [call("bash", PWD_TEXT, index=1, id="2")]}),
            chunk({}, "tool_calls"),
            {"choices": None, "usage": None},
            done=b"data:[DONE]\n\n",
        ).replace(b"\n", b"\r\n")
    ),
    "no [DONE], no last empty line, an id made up for every delta": sse(
        chunk({"tool_calls": [call("bash", "", index=0, id="r1")]}),
        chunk({"tool_calls": [{"index": 0, "id": "r2", "function": {"arguments": LS_TEXT}}]}),
        chunk({"tool_calls": [call("bash", PWD_TEXT, index=1, id="r3")]}),
        chunk({}, "tool_calls"),
        done=b"",
    ).removesuffix(b"\n\n"),
    "calls that grow side by side": sse(
        chunk({"tool_calls": [call("bash", "", index=0, id="a"), call("bash", "", index=1, id="b")]}),
        chunk({"tool_calls": [{"index": 1, "function": {"arguments": '{"command"'}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": LS_TEXT}}]}),
        chunk({"tool_calls": [{"index": 1, "function": {"arguments": ': "pwd"}'}}]}),
        chunk({}, "tool_calls"),
    ),
    "the id first, the name after it": sse(
        chunk({"tool_calls": [{"index": 0, "id": "a", "type": "function"}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": "bash"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": LS_TEXT}}]}),
        chunk({"tool_calls": [call("bash", PWD_TEXT, index=1, id="b")]}),
        chunk({}, "tool_calls"),
    ),
    "the whole call once more at its end": sse(
        chunk({"tool_calls": [call("bash", LS_TEXT, index=0, id="a"), call("bash", PWD_TEXT, index=1, id="b")]}),
        chunk({"tool_calls": [call("bash", LS_TEXT, index=0, id="a"), call("bash", PWD_TEXT, index=1, id="b")]}),
        chunk({}, "tool_calls"),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
async def test_parallel_calls_of_known_servers(upstream: Upstream, name: str) -> None:
    reading = await read(upstream, KNOWN[name])
    assert reading.message == ("", "", [LS, PWD])
    assert as_client(reading.events) == reading.message
    assert reading.choice.finish == "tool_calls"
    assert not reading.parser.unparsable
    assert not reading.last.complete
    assert read_as_vendor(KNOWN[name]) == reading.message


def read_as_vendor(stream: bytes) -> Any:
    """The message that the record of a relayed stream has."""
    reader = ChatReader()
    for event in stream.replace(b"\r\n", b"\n").split(b"\n\n"):
        if event.strip():
            reader.event(event.removeprefix(b"data:").removeprefix(b" "))
    return meaning(reader.choice().message)


async def test_the_old_function_call(upstream: Upstream) -> None:
    stream = sse(
        chunk({"role": "assistant", "content": None, "function_call": {"name": "bash", "arguments": ""}}),
        chunk({"function_call": {"arguments": '{"command": '}}),
        chunk({"function_call": {"arguments": '"ls"}'}}),
        chunk({}, "function_call"),
    )
    reading = await read(upstream, stream)
    assert reading.message == ("", "", [LS])
    assert as_client(reading.events) == reading.message == read_as_vendor(stream)


@pytest.mark.parametrize(
    ("reason", "finish", "unknown"),
    [
        ("stop", "stop", ""),
        ("eos", "stop", ""),
        ("MAX_TOKENS", "length", ""),
        ("model_length", "length", ""),
        ("repetition", "stop", "repetition"),
        ("function_call_filter: MALFORMED_FUNCTION_CALL", "stop", "function_call_filter: MALFORMED_FUNCTION_CALL"),
        ("", "stop", "none"),
        (None, "stop", "none"),
    ],
)
async def test_finish_reasons(upstream: Upstream, reason: Any, finish: str, unknown: str) -> None:
    reading = await read(upstream, sse(chunk({"content": "hi"}, ""), chunk({}, reason)))
    assert (reading.choice.finish, reading.last.unknown_finish) == (finish, unknown)


@pytest.mark.parametrize("reason", ["", None])
async def test_a_stream_without_any_end_is_no_reply(upstream: Upstream, reason: Any) -> None:
    with pytest.raises(EngineProtocolError, match="ended before"):
        await read(upstream, sse(chunk({"content": "hi"}, reason), done=b""))
    with pytest.raises(EngineProtocolError, match="inside an event"):
        await read(upstream, sse(chunk({"content": "hi"}), done=b'data: {"choices": [{"fin'))


@pytest.mark.parametrize(
    "error", ["out of memory", {"message": "out of memory"}, {"message": "out of memory", "code": 1}]
)
async def test_an_error_in_the_stream_is_the_upstreams_word(upstream: Upstream, error: Any) -> None:
    with pytest.raises(EngineUnavailable, match="out of memory"):
        await read(upstream, sse(chunk({"content": "hi"}), {"error": error}))


async def test_a_nameless_call_is_flagged(upstream: Upstream) -> None:
    reading = await read(upstream, sse(chunk({"tool_calls": [{"index": 0, "id": "a"}]}), chunk({}, "tool_calls")))
    assert reading.choice.message.tool_calls == ()
    assert reading.choice.finish == "stop"
    assert reading.parser.unparsable


async def test_what_comes_for_a_call_after_its_end_is_flagged(upstream: Upstream) -> None:
    stream = sse(
        chunk({"tool_calls": [call("bash", LS_TEXT, index=0, id="a"), call("bash", PWD_TEXT, index=1, id="b")]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "more"}}]}),
        chunk({}, "tool_calls"),
    )
    reading = await read(upstream, stream)
    assert as_client(reading.events) == reading.message == ("", "", [LS, PWD])
    assert reading.parser.unparsable


async def test_numbers_in_an_arguments_object_stay_as_written(upstream: Upstream) -> None:
    arguments = b'{"n": 123456789012345678901234567890, "x": 1.50}'
    stream = sse(chunk({"tool_calls": [call("bash", "@", index=0, id="a")]}, "stop")).replace(b'"@"', arguments)
    reading = await read(upstream, stream)
    assert reading.choice.message.tool_calls[0].arguments == arguments.decode()


@dataclass
class Deviations:
    """One way to write a reply, drawn from a seed."""

    seed: int
    thinking: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.thinking = self.dice.choice(["", "Hm.", "三 \u2028 steps"])
        self.text = self.dice.choice(["", "I look.", " edges \n"])
        self.calls = [
            (self.dice.choice(["bash", "read"]), self.dice.choice([{}, {"command": "ls"}, {"a": [1, "}"], "b": None}]))
            for _ in range(self.dice.randrange(4))
        ]
        if not (self.text or self.calls):
            self.text = "ok"
        self.has_ids = self.dice.random() < 0.5
        self.tokens = 0

    def pieces(self, text: str) -> list[str]:
        """The text, cut anywhere."""
        cuts = sorted(self.dice.randrange(len(text) + 1) for _ in range(self.dice.randrange(3)))
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def content(self, text: str) -> Any:
        parts = [{"type": "text", "text": text}]
        return self.dice.choice([text, text, parts, [text]])

    def deltas(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = self.dice.choice(
            [[], [{"role": "assistant"}], [{"role": "assistant", "content": ""}], [{"content": None}]]
        )
        name = self.dice.choice(["reasoning", "reasoning_content", "thinking"])
        deltas = [*deltas, *({name: piece} for piece in self.pieces(self.thinking) if piece)]
        deltas += [{"content": self.content(piece)} for piece in self.pieces(self.text) if piece]
        return deltas + self.call_deltas()

    def call_deltas(self) -> list[dict[str, Any]]:
        indexed, named = self.dice.choice([("right", True), ("right", False), ("none", True), ("zero", True)]), 0
        style, has_ids = indexed
        # Without ids, only complete arguments and names tell calls apart: the first of two calls must have some.
        has_ids = has_ids and (style == "right" or self.dice.random() < 0.7)
        if len(self.calls) == 1 and self.dice.random() < 0.2:
            (only,) = self.calls
            first, *rest = self.pieces(json.dumps(only[1]))
            return [{"function_call": {"name": only[0], "arguments": first}}] + [
                {"function_call": {"arguments": piece}} for piece in rest
            ]
        deltas: list[dict[str, Any]] = []
        for position, (name, arguments) in enumerate(self.calls):
            place: dict[str, Any] = {"right": {"index": position}, "none": {}, "zero": {"index": 0}}[style]
            identity = {"id": f"id-{position}"} if has_ids else self.dice.choice([{}, {"id": ""}, {"id": None}])
            repeats = has_ids and self.dice.random() < 0.3
            pieces: list[Any] = self.pieces(json.dumps(arguments))
            if self.dice.random() < 0.3:
                pieces = [arguments]
            for number, piece in enumerate(pieces):
                function = {"arguments": piece} | ({"name": name} if number == 0 or repeats else {})
                entry = {**place, "type": "function", "function": function}
                deltas.append({"tool_calls": [entry | (identity if number == 0 or repeats else {})]})
                named += 1
        return self.joined(deltas)

    def joined(self, deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Some neighbours in one delta."""
        out: list[dict[str, Any]] = []
        for delta in deltas:
            if out and self.dice.random() < 0.3:
                out[-1] = {"tool_calls": [*out[-1]["tool_calls"], *delta["tool_calls"], None]}
            else:
                out.append(delta)
        return out

    def events(self) -> list[dict[str, Any]]:
        no_finish = self.dice.choice(["", None])
        events: list[dict[str, Any]] = []
        for delta in self.deltas():
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": no_finish}
            has_content = delta.keys() - {"role"} and any(delta.values()) and delta.get("content") != ""
            if self.has_ids and has_content:
                size = self.dice.randrange(1, 3)
                choice["token_ids"] = list(range(self.tokens, self.tokens + size))
                choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5}] * size}
                self.tokens += size
            events.append({"choices": [choice]})
            if self.dice.random() < 0.1:
                events.append(self.dice.choice([{"choices": []}, {"choices": None}, {"type": "ping"}]))
        finish = self.dice.choice(["stop", "tool_calls"] if self.calls else ["stop"])
        end: dict[str, Any] = {"delta": self.dice.choice([{}, None]), "finish_reason": finish}
        if self.has_ids:
            end |= {"token_ids": [self.tokens], "logprobs": {"content": [{"token": "x", "logprob": -0.5}]}}
            self.tokens += 1
            events[0]["prompt_token_ids"] = [7, 8]
        return [*events, {"choices": [end]}]

    def usage(self) -> list[dict[str, Any]]:
        counts = {"prompt_tokens": 2, "completion_tokens": self.tokens, "prompt_tokens_details": None}
        return self.dice.choice([[], [{"choices": [], "usage": counts}], [{"usage": counts}]])

    def whole(self) -> bytes:
        message = {
            "role": "assistant",
            "content": self.text or None,
            "reasoning": self.thinking or None,
            "tool_calls": [call(name, arguments, id="x") for name, arguments in self.calls] or None,
        }
        return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()


@pytest.mark.parametrize("block", range(4))
async def test_no_deviation_changes_the_message(upstream: Upstream, block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        reply = Deviations(seed)
        expected = (reply.thinking, reply.text, reply.calls)
        events = [*reply.events(), *reply.usage()]
        done = reply.dice.choice(
            [b"data: [DONE]\n\n", b"data:[DONE]\n\n", b"data: [DONE] \r\n\r\n", b"", b"data: [DONE]"]
        )
        reading = await read(upstream, sse(*events, done=done))
        assert reading.message == expected, (seed, events)
        assert as_client(reading.events) == expected, (seed, events)
        assert reading.choice.finish == ("tool_calls" if reply.calls else "stop"), seed
        assert not reading.parser.unparsable, seed
        assert reading.last.complete is reply.has_ids, (seed, events)
        whole = await read(upstream, reply.whole(), "application/json")
        assert whole.message == expected, seed
        assert as_client(whole.events) == expected, seed


@pytest.mark.parametrize("with_logprobs", [True, False])
@pytest.mark.parametrize("with_usage", [True, False])
async def test_ids_that_one_event_lacks_are_noticed(upstream: Upstream, with_usage: bool, with_logprobs: bool) -> None:
    """Whatever else is missing: a reply whose ids don't cover it is never taken as covered."""
    for seed in range(100):
        reply = Deviations(seed)
        if not reply.has_ids:
            continue
        events = reply.events()
        holders = [
            event["choices"][0] for event in events if event.get("choices") and "token_ids" in event["choices"][0]
        ]
        robbed = reply.dice.choice(holders)
        robbed["token_ids"] = reply.dice.choice([None, []])
        if not with_logprobs:
            for choice in holders:
                choice["logprobs"] = None
        usage = (
            [{"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": reply.tokens}}] if with_usage else []
        )
        reading = await read(upstream, sse(*events, *usage))
        assert not reading.last.complete, (seed, events)
