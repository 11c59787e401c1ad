"""The scripted engine's HTTP: sampling routes as raw ASGI, since they must notice a client that leaves while nothing
is being sent, and must be able to break their own answers off at any byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from rolltap.engine.scripted.sampling import BrokenEvent, ConnectionCut, Model, Piece, Plan
from rolltap.engine.scripted.wires.base import Wire
from rolltap.errors import InvalidRequest, RolltapError

DONE = b"data: [DONE]\n\n"
GARBAGE = b'data: {"choices": [{"token_ids": [1, 2\n\n'
ERROR_TYPES = {400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError", 429: "RateLimitError"}

JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


class SamplingRoute:
    """A wire over a model, as an ASGI application."""

    def __init__(self, wire: Wire, model: Model) -> None:
        self._wire = wire
        self._model = model

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await _body(receive)
        if body is None:
            return
        answer = asyncio.ensure_future(self._answer(scope, body, Sender(send)))
        hang_up = asyncio.ensure_future(_gone(receive))
        await asyncio.wait((answer, hang_up), return_when=asyncio.FIRST_COMPLETED)
        hang_up.cancel()
        if not answer.done():
            answer.cancel()
            await asyncio.wait((answer,))
            return
        await answer

    async def _answer(self, scope: Any, body: bytes, sender: Sender) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            ask = self._wire.read(_object(body), headers)
            plan = self._model.plan(ask)
        except RolltapError as error:
            await sender.json(error.status, error_body(error.status, error.message))
            return
        if plan.fault == "status":
            fault = plan.reply.fault
            assert fault is not None
            self._model.journal.end(plan.entry, "status")
            after = [] if fault.retry_after is None else [(b"retry-after", f"{fault.retry_after:g}".encode())]
            await sender.json(fault.status, error_body(fault.status, "as the script says"), after)
        elif ask.stream:
            await self._stream(plan, sender)
        else:
            await self._whole(plan, sender)

    async def _stream(self, plan: Plan, sender: Sender) -> None:
        fault = plan.reply.fault
        sender.cut_at = fault.at_byte if plan.fault == "cut" and fault is not None else None
        try:
            async with aclosing(self._model.pieces(plan)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    await self._say(plan, piece, sender)
        except ConnectionCut:
            if not sender.started:
                await sender.start(200, STREAM_HEADERS)
            raise
        if plan.fault not in ("error", "unfinished"):
            if (last := self._wire.last(plan)) is not None:
                await sender.write(event(last))
            await sender.write(DONE)
        await sender.end()

    async def _say(self, plan: Plan, piece: Piece | BrokenEvent, sender: Sender) -> None:
        if isinstance(piece, BrokenEvent):
            await self._send_broken(piece, sender)
            return
        if not sender.started:
            await sender.start(200, STREAM_HEADERS)
            if (first := self._wire.first(plan)) is not None:
                await sender.write(event(first))
        await sender.write(event(self._wire.event(plan, piece), plan))

    async def _send_broken(self, broken: BrokenEvent, sender: Sender) -> None:
        if not sender.started:
            await sender.start(200, STREAM_HEADERS)
        if broken.kind == "garbage":
            await sender.write(GARBAGE)
        elif broken.kind == "error":
            await sender.write(event(error_body(500, "as the script says")) + DONE)

    async def _whole(self, plan: Plan, sender: Sender) -> None:
        whole = Piece([], 0, None)
        async with aclosing(self._model.pieces(plan)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                if isinstance(piece, BrokenEvent):
                    await sender.json(500, error_body(500, "as the script says"))
                    return
                whole.ids += piece.ids
                if piece.logprobs is not None:
                    whole.logprobs = (whole.logprobs or []) + piece.logprobs
                whole.finish, whole.spans = piece.finish, piece.spans
        answer = self._wire.whole(plan, whole)
        await sender.json(200, answer if isinstance(answer, bytes) else encode(answer, plan))


class Sender:
    """Writes a response; drops the connection before byte `cut_at` of its body."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._written = 0
        self.started = False
        self.cut_at: int | None = None

    async def json(self, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        await self.start(status, [*JSON_HEADERS, *headers])
        data = value if isinstance(value, bytes) else encode(value)
        await self._send({"type": "http.response.body", "body": data})

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes) -> None:
        if self.cut_at is not None and self._written + len(data) >= self.cut_at:
            await self._body(data[: self.cut_at - self._written])
            raise ConnectionCut
        await self._body(data)

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _body(self, data: bytes) -> None:
        self._written += len(data)
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


def encode(value: Any, plan: Plan | None = None) -> bytes:
    """JSON; with NaN where the fault asks for it, as Python's own writer has it."""
    if plan is not None and plan.fault == "nan_logprobs":
        return json.dumps(value).encode()
    return msgspec.json.encode(value)


def event(value: Any, plan: Plan | None = None) -> bytes:
    return b"data: " + encode(value, plan) + b"\n\n"


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be an object")
    return value


async def _body(receive: Any) -> bytes | None:
    """The whole body; None if the client left before its end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
