"""An engine that costs as little as a server can: canned replies, settable delay and pace. For measuring proxies.

    POST /v1/chat/completions     chat replies without token ids: what the floor forwards
    POST /inference/v1/generate   vLLM's token API: what the proxy asks for
    POST /shape                   a `Shape` as JSON; holds for every later reply

Replies are serialised when the shape changes; a request is only searched for `"stream":true`. Each token is `--token`
(text "~" in both forms), so that a client counts frames by counting `~`, however a proxy cuts them. Run as
`python -m tests.bench.canned_engine --port N --token ID --end ID`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from typing import Any, cast

import httptools
import msgspec
import uvloop

CHAT, GENERATE = b"/v1/chat/completions", b"/inference/v1/generate"
TEXT = "~"
MODEL = "canned"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of every reply: its size, the time before it starts, and the time between two frames of a stream."""

    tokens: int = 32
    delay_s: float = 0.0
    pace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The bytes of one reply, whole and streamed."""

    whole: bytes
    opening: bytes
    frames: tuple[bytes, ...]
    closing: bytes


def chat_reply(tokens: int) -> Reply:
    head = {"id": "chatcmpl-canned", "created": 1, "model": MODEL}
    usage = {"prompt_tokens": 64, "completion_tokens": tokens, "total_tokens": 64 + tokens}

    def logprobs(count: int) -> dict[str, Any]:
        return {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * count}

    def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs(len(delta) if "role" not in delta else 0)}
        return event(head | {"object": "chat.completion.chunk", "choices": [choice | {"finish_reason": finish}]} | more)

    message = {"role": "assistant", "content": TEXT * tokens, "tool_calls": []}
    choice = {"index": 0, "message": message, "logprobs": logprobs(tokens), "finish_reason": "stop"}
    return Reply(
        whole=document(head | {"object": "chat.completion", "choices": [choice], "usage": usage}),
        opening=chunk({"role": "assistant", "content": ""}),
        frames=(chunk({"content": TEXT}),) * tokens,
        closing=chunk({}, "stop", usage=usage) + http_chunk(b"data: [DONE]\n\n"),
    )


def token_reply(tokens: int, token: int, end: int) -> Reply:
    def choice(ids: list[int], finish: str | None = None, **more: Any) -> dict[str, Any]:
        content = [{"token_id": id, "logprob": -0.5, "rank": 1, "top_logprobs": []} for id in ids]
        return {"index": 0, "token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}} | more

    versions = [{"version": "0", "start": 0, "end": tokens + 1}]
    head = {"request_id": "canned"}
    everything = choice([token] * tokens + [end], "stop", weight_versions=versions)
    return Reply(
        whole=document(head | {"choices": [everything], "prompt_logprobs": None}),
        opening=b"",
        frames=(event(head | {"choices": [choice([token])]}),) * tokens,
        closing=event(head | {"choices": [choice([end], "stop", weight_versions=versions)]})
        + http_chunk(b"data: [DONE]\n\n"),
    )


def document(value: Any, status: bytes = b"200 OK") -> bytes:
    body = msgspec.json.encode(value)
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
    return head + body


def event(value: Any) -> bytes:
    return http_chunk(b"data: " + msgspec.json.encode(value) + b"\n\n")


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class CannedEngine:
    """The current shape and the replies made for it."""

    def __init__(self, token: int, end: int) -> None:
        self._token, self._end = token, end
        self.reshape(Shape())

    def reshape(self, shape: Shape) -> None:
        self.shape = shape
        self.replies = {
            CHAT: chat_reply(shape.tokens),
            GENERATE: token_reply(shape.tokens, self._token, self._end),
        }

    def other(self, path: bytes, body: bytes) -> bytes:
        """The answer to what is no model call."""
        if path == b"/shape":
            self.reshape(Shape(**json.loads(body)))
            return document({})
        if path == b"/v1/models":
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "rolltap", "max_model_len": 131072}
            return document({"object": "list", "data": [model]})
        if path == b"/health":
            return document({})
        return document({"error": "no such path"}, b"404 Not Found")


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, requests one after the other."""

    def __init__(self, engine: CannedEngine) -> None:
        self._engine, self._loop = engine, asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.WriteTransport | None = None
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's transports have no common base class

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url.partition(b"?")[0]

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body.clear()
        if self._path not in self._engine.replies:
            self._write(self._engine.other(self._path, body))
        elif delay := self._engine.shape.delay_s:
            self._loop.call_later(delay, self._reply, body)
        else:
            self._reply(body)

    def _reply(self, body: bytes) -> None:
        reply, pace = self._engine.replies[self._path], self._engine.shape.pace_s
        if b'"stream":true' not in body:
            self._write(reply.whole)
            return
        self._write(STREAM_HEAD + reply.opening)
        if pace:
            self._paced(reply, self._loop.time(), 0, pace)
            return
        for frame in reply.frames:
            self._write(frame)
        self._write(reply.closing + b"0\r\n\r\n")

    def _paced(self, reply: Reply, start: float, index: int, pace: float) -> None:
        if index == len(reply.frames):
            self._write(reply.closing + b"0\r\n\r\n")
            return
        self._write(reply.frames[index])
        self._loop.call_at(start + (index + 1) * pace, self._paced, reply, start, index + 1, pace)

    def _write(self, data: bytes) -> None:
        if self._transport:
            self._transport.write(data)


async def serve(port: int, engine: CannedEngine) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token", type=int, required=True, help='the id of "~"')
    parser.add_argument("--end", type=int, required=True, help="the id that ends a turn")
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, CannedEngine(arguments.token, arguments.end)))
