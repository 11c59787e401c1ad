"""Carries a harness's call to its vendor and the answer back, byte for byte, with the record beside it.

The intent is written before the vendor is asked; the reply's last bytes go out when its completion is durable. What a
vendor says is never changed, its errors included. A call has no token ids, so it is never trained (`tokens_missing`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass, field

import msgspec
import numpy as np

from rolltap.errors import RequestError, RolltapError
from rolltap.ids import new_id
from rolltap.proxy.call.http_exchange import BrokenReply, ClientGone, Exchange
from rolltap.proxy.call.in_flight import kind_of
from rolltap.proxy.call.recorder import OpenCall, Recorder
from rolltap.proxy.call.sources.passthrough_reply import Reading
from rolltap.proxy.call.sources.vendor_access import Access, Grant
from rolltap.proxy.call.turn_cap import check_turn
from rolltap.proxy.continuation.forest import Node
from rolltap.proxy.conversation.chat import ChatRequest, Message, Text
from rolltap.proxy.dialects import known_dialects
from rolltap.proxy.dialects.base import Action, Dialect, WireRequest
from rolltap.proxy.dialects.hints import read_hints
from rolltap.proxy.engines.http import said
from rolltap.proxy.engines.passthrough import NativeReply, NativeRequest
from rolltap.proxy.sessions.capture import Capture
from rolltap.proxy.sessions.session_cache import LiveSession
from rolltap.settings import LimitSettings
from rolltap.types import Flaw, Outcome

log = logging.getLogger("rolltap.vendors")

NO_TOKENS = np.empty(0, np.int32)
MAX_WORDS = 65_536
"""Bytes of an error's body that are looked at for its message."""


@dataclass(slots=True, eq=False)
class RelayedCall:
    """One call on its way. `failure` is what kept the vendor's reply from coming whole."""

    grant: Grant
    live: LiveSession
    call: OpenCall
    reading: Reading
    status: int = 200
    words: bytearray = field(default_factory=bytearray)  # of an error's body
    left: bool = False  # the client went away before the reply was there
    failure: RolltapError | None = None

    def outcome(self, request: NativeRequest) -> tuple[Outcome, str]:
        """How the call ended, and why if not well. What the vendor says of a key it refused is not kept."""
        if self.left and not self.reading.ended:
            return Outcome.ABORTED, "the client went away"
        if self.failure is not None:
            return Outcome.ENGINE_ERROR, f"{self.failure.code}: {self.failure.message}"
        if self.status in (401, 403):
            return Outcome.ENGINE_ERROR, f"the vendor answered {self.status}"
        if not 200 <= self.status < 300:
            text = request.without_key(said(self.words.decode("utf-8", "replace")))
            return Outcome.ENGINE_ERROR, f"the vendor answered {self.status}: {text}"
        if self.reading.error:
            return Outcome.ENGINE_ERROR, f"the vendor said: {request.without_key(self.reading.error)}"
        if not self.reading.ended:
            return Outcome.ENGINE_ERROR, "the vendor's stream ended before its last event"
        return Outcome.COMPLETED, ""


class Relay:
    """Serves the requests that `Access` grants."""

    def __init__(self, access: Access, capture: Capture, recorder: Recorder, limits: LimitSettings) -> None:
        self._access = access
        self._capture = capture
        self._recorder = recorder
        self._limits = limits

    async def take(self, action: Action, dialect: Dialect, wire: WireRequest, exchange: Exchange) -> bool:
        """Answers a request that is one for a vendor; False if it is not."""
        grant = await self._access.grant(dialect, wire)
        if grant is None:
            return False
        if action == "generate":
            await self._generate(grant, dialect, wire, exchange)
        else:
            await self._forward(grant, wire, exchange)
        return True

    async def _generate(self, grant: Grant, dialect: Dialect, wire: WireRequest, exchange: Exchange) -> None:
        """Answers one model call."""
        chat = read_request(dialect, wire)
        live = grant.live or await self._capture.session(chat, grant.policy.name)
        try:
            call = await self._admit(grant, live, chat, wire.body)
        except RequestError as error:
            await self._recorder.refuse(live.session.id, grant.policy.name, dialect.name, wire.body, error)
            raise
        try:
            await self._carry(call, native(wire, exchange), exchange)
        finally:
            live.leave()

    async def _forward(self, grant: Grant, wire: WireRequest, exchange: Exchange) -> None:
        """Passes on a request that makes no model call: models, token counts, stored replies. Nothing is recorded."""
        try:
            async with exchange.while_connected(), grant.policy.engine.relay(native(wire, exchange)) as reply:
                await exchange.start(reply.status, reply.headers)
                async for chunk in reply.chunks:
                    await exchange.write(chunk)
        except RolltapError as error:
            raise (BrokenReply(str(error)) if exchange.started else error) from None
        await exchange.end(b"")

    async def _admit(self, grant: Grant, live: LiveSession, chat: ChatRequest, body: bytes) -> RelayedCall:
        """Counts the call in and begins it; what is refused was not sent to the vendor."""
        live.enter(self._limits.calls_at_once)
        try:
            return await self._begin(grant, live, chat, body)
        except BaseException:
            live.leave()
            raise

    async def _begin(self, grant: Grant, live: LiveSession, chat: ChatRequest, body: bytes) -> RelayedCall:
        """Places the call and writes its intent."""
        policy = grant.policy
        async with live.planning:
            call_id = new_id()
            plan = await policy.plan(call_id, live.forest, chat)
            check_turn(live, plan.parent)
            node = Node(call_id, plan.parent, plan.lineage, plan.prompt_ids, plan.shared, items=chat.items)
            request = policy.sample_request(call_id, live.session.id, chat, [])
            call = OpenCall(call_id, node, plan, request, [], time.time())
            live.forest.add(node)
        kind, body_hash = kind_of(policy, chat), hashlib.sha256(body).hexdigest()
        try:
            await self._recorder.begin(call, live.session.id, policy.name, chat, kind, body_hash)
        except BaseException:
            live.forest.complete(node, NO_TOKENS, None, Outcome.ABORTED)
            raise
        make_reader = known_dialects()[chat.dialect].reply_reader
        assert make_reader is not None  # Access grants no other dialect
        return RelayedCall(grant, live, call, Reading(make_reader()))

    async def _carry(self, call: RelayedCall, request: NativeRequest, exchange: Exchange) -> None:
        """Relays, records, and only then lets the reply end."""
        head: NativeReply | None = None
        try:
            async with exchange.while_connected(), call.grant.policy.engine.relay(request) as head:
                await self._pass_on(call, head, exchange)
        except ClientGone:
            call.left = True
        except RolltapError as error:
            call.failure = error
        except Exception as error:  # noqa: BLE001  logged without its message, which may hold the key
            log.error("call %s: relaying failed with %s", call.call.id, type(error).__name__)
            call.failure = RolltapError("internal error; the server's log has it")
        recording = asyncio.create_task(self._record(call, request))
        try:
            async with exchange.while_connected():
                await asyncio.shield(recording)
        except ClientGone:
            await recording
        except RolltapError as error:
            raise (BrokenReply(str(error)) if exchange.started else error) from None
        if not exchange.gone:
            await self._end(call, head, exchange)
        self._recorder.delivered([call.call], not exchange.gone)

    async def _pass_on(self, call: RelayedCall, reply: NativeReply, exchange: Exchange) -> None:
        """The vendor's reply up to what must wait for the record."""
        call.status = reply.status
        well = reply.status < 300
        call.reading.begin(streamed=well and reply.streamed)
        if well and reply.streamed:
            await exchange.start(reply.status, reply.headers)
        async for chunk in reply.chunks:
            if not well:
                call.words += chunk[: MAX_WORDS - len(call.words)]
            if ready := call.reading.pass_on(chunk):
                if not exchange.started:
                    await exchange.start(reply.status, reply.headers)
                await exchange.write(ready)
        if well:
            call.reading.end()

    async def _record(self, call: RelayedCall, request: NativeRequest) -> None:
        """Writes the completion; returns when it is durable."""
        outcome, error = call.outcome(request)
        choice = call.reading.choice()
        live, node = call.live, call.call.node
        try:
            await self._recorder.complete(
                call.call,
                call.grant.policy.name,
                outcome,
                choice,
                flaw=Flaw.TOKENS_MISSING if outcome is Outcome.COMPLETED else None,
                usage=call.reading.usage,
                error=error,
                engine=call.grant.policy.engine.name,
                logprobs_mode=call.grant.policy.logprobs_mode,
            )
        except BaseException:
            outcome = Outcome.ABORTED
            raise
        finally:
            live.forest.complete(node, NO_TOKENS, choice.message if choice is not None else None, outcome)

    async def _end(self, call: RelayedCall, head: NativeReply | None, exchange: Exchange) -> None:
        """The bytes that were held back and the reply's end; a reply that did not come whole is cut off."""
        if call.failure is not None:
            raise (BrokenReply(str(call.failure)) if exchange.started else call.failure)
        assert head is not None
        if not exchange.started:
            await exchange.start(head.status, head.headers)
        await exchange.end(call.reading.rest())


def read_request(dialect: Dialect, wire: WireRequest) -> ChatRequest:
    """The request as far as it can be read: the vendor may take what the dialect does not know."""
    try:
        return dialect.parse(wire)
    except RequestError:
        text = wire.body.decode("utf-8", "replace")
        return ChatRequest(
            dialect=dialect.name,
            model=wire.path_params.get("model", ""),
            messages=(Message("user", (Text(text),)),),
            hints=read_hints(wire.headers),
            head=msgspec.json.encode({"unread": text}),
        )


def native(wire: WireRequest, exchange: Exchange) -> NativeRequest:
    """The request as the vendor gets it: without the URL prefix that names a session."""
    path = wire.path
    if (session := wire.path_params.get("session")) is not None:
        path = path.removeprefix(f"/s/{session}")
    return NativeRequest(exchange.scope["method"], path, wire.query, wire.headers, wire.body)
