"""Passthrough: sends the harness's bytes to its vendor and returns the vendor's bytes.

A vendor's reply is never changed, including its errors. It is parsed only for the record, while its bytes are relayed;
a reply that cannot be parsed still reaches the client. A dialect's reader turns bodies and events into the assistant's
message, in the form that the dialect parses when the harness sends the message back: the next call finds its parent by
it. A call has no token ids, so it is never trained (`tokens_missing`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rolltap.errors import EngineProtocolError, InvalidRequest, NotFound, RolltapError, Unauthenticated
from rolltap.protocols.base import ReplyReader, WireRequest
from rolltap.protocols.conversation import ChatRequest, Choice, Usage
from rolltap.proxy.call.http_exchange import HttpExchange
from rolltap.proxy.call.open_call import OpenCall
from rolltap.proxy.call.policies import ANY_MODEL
from rolltap.proxy.call.policy import (
    Arrival,
    Begin,
    CallEvent,
    ClientReply,
    Publish,
    RelayedBytes,
    RelayedHead,
    RepliedRequest,
)
from rolltap.proxy.call.sources.base import UpstreamSource
from rolltap.proxy.continuation.forest import Forest
from rolltap.proxy.continuation.plan import ParentFinder, PromptPlan
from rolltap.proxy.engines.base import ChatCall
from rolltap.proxy.engines.http import SseParser, error_text
from rolltap.proxy.engines.passthrough import NativeRequest, PassthroughUpstream, vendor_path
from rolltap.types import Flaw

log = logging.getLogger("rolltap.passthrough")


@dataclass(slots=True, eq=False)
class PassthroughSource(UpstreamSource):
    """A vendor's models."""

    name: str
    engine: PassthroughUpstream
    parents: ParentFinder
    knows_prompt: bool = True
    replayable: bool = False  # the vendor answers every request itself, retries too
    sets_sampling: bool = False
    injects: bool = False
    asks_peers: bool = False
    vocabulary: str = ""
    tokenizer: Any = None

    @property
    def relayed_dialects(self) -> Sequence[str]:
        return () if self.engine.keyed else sorted(self.engine.dialects)

    def refusal(self) -> Unauthenticated:
        """The error for a call with the wrong kind of key, or in a protocol that this vendor does not speak."""
        key = "a key of rolltap's" if self.engine.keyed else "the vendor's own key, not rolltap's"
        spoken = ", ".join(self.engine.dialects)
        return Unauthenticated(f"policy {self.name!r} relays calls to its vendor: send {key}; it speaks {spoken}")

    def check_model(self, model: str, allowed: Collection[str]) -> None:
        """Refuses a model outside `allowed` if the vendor's key is in the settings.

        Empty, or with `*`: all are allowed.
        """
        if self.engine.keyed and allowed and model not in allowed and ANY_MODEL not in allowed:
            raise NotFound(f"the model {model[:80]!r} is not served here; served: {', '.join(allowed)}", param="model")

    def check(self, request: ChatRequest) -> None:
        """Checks nothing: the vendor decides what it accepts."""

    def unapplied(self, request: ChatRequest, temperature: float | None) -> tuple[str, ...]:
        return ()

    def open(self, arrival: Arrival, plan: PromptPlan, call_ids: Sequence[str]) -> list[OpenCall]:
        request = arrival.request
        sent = ChatCall(call_ids[0], request.model, request, request.sampling, arrival.session.session.id)
        return [OpenCall(call_ids[0], 0, plan.node(call_ids[0], request.items), plan, sent, [])]

    async def run(self, call: OpenCall, arrival: Arrival, begin: Begin, publish: Publish) -> None:
        native = native_request(arrival.wire)
        make_reader = arrival.dialect.reply_reader
        assert make_reader is not None  # admission lets no other dialect through
        reader = RelayedReplyReader(make_reader())
        try:
            async with self.engine.relay(native) as reply:
                reader.begin(reply.status, streamed=reply.streamed)
                publish([RelayedHead(reply.status, reply.headers, streamed=reader.streamed)])
                async for chunk in reply.chunks:
                    if ready := reader.pass_on(chunk):
                        publish([RelayedBytes(ready)])
                reader.end()
        except RolltapError:
            raise
        except Exception as error:  # noqa: BLE001  logged without its message, which may hold the key
            log.error("call %s: relaying failed with %s", call.id, type(error).__name__)
            raise RolltapError("internal error; the server's log has it") from None
        finally:
            call.complete, call.choice, call.usage = reader.ended, reader.choice(), reader.usage
            call.problem = native.without_key(reader.problem)
            call.flaw = None if call.problem else Flaw.TOKENS_MISSING
            call.withheld = reader.rest()

    async def count_tokens(self, forest: Forest, request: ChatRequest) -> int:
        raise InvalidRequest(f"the model {request.model!r} belongs to a vendor; rolltap cannot count its tokens")

    def reply(self, replied: RepliedRequest, arrival: Arrival, http: HttpExchange) -> ClientReply:
        return RelayedReply(http, replied)

    async def forward(self, wire: WireRequest, http: HttpExchange) -> None:
        """Forwards a request that is not a model call: models, token counts, stored replies. Nothing is recorded."""
        async with http.while_connected(), self.engine.relay(native_request(wire)) as reply:
            await http.start(reply.status, reply.headers)
            async for chunk in reply.chunks:
                await http.write(chunk)
        await http.end(b"")


class RelayedReply:
    """Writes a vendor's reply to the client. Sends the head with the first bytes, or at the end."""

    def __init__(self, http: HttpExchange, replied: RepliedRequest) -> None:
        self._http = http
        self._replied = replied
        self._head: RelayedHead | None = None

    async def send(self, events: Sequence[CallEvent]) -> None:
        for event in events:
            if isinstance(event, RelayedHead):
                self._head = event
                if event.streamed:
                    await self._open()
            elif isinstance(event, RelayedBytes):
                await self._open()
                await self._http.write(event.data)

    def put(self, events: Sequence[CallEvent]) -> bool:
        if not self._http.takes_parts or not all(isinstance(event, RelayedBytes) for event in events):
            return False
        self._http.put(b"".join([event.data for event in events if isinstance(event, RelayedBytes)]))
        return True

    async def keep_alive(self) -> None:
        """Sends nothing: every byte comes from the vendor."""

    async def end(self) -> None:
        await self._open()
        await self._http.end(self._replied.calls[0].withheld)

    async def _open(self) -> None:
        if not self._http.started and self._head is not None:
            await self._http.start(self._head.status, self._head.headers)


def native_request(wire: WireRequest) -> NativeRequest:
    """The request for the vendor: its path is the route's, without the URL prefix that names a session."""
    path = vendor_path(wire.route, wire.path_params)
    return NativeRequest(wire.method, path, wire.query, wire.headers, wire.body)


MAX_BODY = 64 << 20
"""Bytes of a reply that is no stream that are kept for parsing."""

MAX_ERROR_BYTES = 65_536
"""Bytes of an error's body that are searched for its message."""


class RelayedReplyReader:
    """Parses a relayed reply and decides which of its bytes must wait until the call is recorded.

    A stream is withheld from the event that clients may accept as its end; any other reply from its last chunk.
    """

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._status = 0  # no head yet
        self._events: SseParser | None = None
        self._body = bytearray()
        self._withheld: list[bytes] = []
        self._unreadable = False

    def begin(self, status: int, *, streamed: bool) -> None:
        """Takes the reply's status. Only a reply without error is parsed as a stream."""
        self._status = status
        self._events = SseParser() if streamed and status < 300 else None

    @property
    def streamed(self) -> bool:
        return self._events is not None

    def pass_on(self, chunk: bytes) -> bytes:
        """Takes a chunk; returns the bytes that may go to the client now."""
        self._withheld.append(chunk)
        if self._events is None:
            limit = MAX_BODY if self._status < 300 else MAX_ERROR_BYTES
            self._body += chunk[: limit - len(self._body)]
            ready, self._withheld = b"".join(self._withheld[:-1]), self._withheld[-1:]
            return ready
        self._read_events(chunk)
        return b"" if self._reader.closing else self.rest()

    def rest(self) -> bytes:
        """The withheld bytes."""
        withheld, self._withheld = b"".join(self._withheld), []
        return withheld

    def end(self) -> None:
        """Parses a whole reply: the vendor has sent everything."""
        if self._events is None and self._status < 300:
            self._try_read(self._reader.whole, bytes(self._body))

    @property
    def ended(self) -> bool:
        """Whether the reply is complete, as far as it can be parsed."""
        return self._reader.ended or self._unreadable

    @property
    def problem(self) -> str:
        """Why the call is not completed; empty if it is. The vendor's message about a refused key is left out."""
        if self._status in (401, 403):
            return f"the vendor answered {self._status}"
        if self._status and not 200 <= self._status < 300:
            return f"the vendor answered {self._status}: {error_text(self._body.decode('utf-8', 'replace'))}"
        if self._reader.error:
            return f"the vendor reported: {self._reader.error}"
        return "" if self.ended else "the vendor's stream ended before its last event"

    @property
    def usage(self) -> Usage | None:
        return self._reader.usage

    def choice(self) -> Choice | None:
        """The assistant's message so far; None if it cannot be parsed or is empty."""
        try:
            choice = self._reader.choice()
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest):
            return None
        return choice if choice.message.parts or choice.message.tool_calls else None

    def _read_events(self, chunk: bytes) -> None:
        assert self._events is not None
        try:
            events = self._events.feed(chunk)
        except EngineProtocolError:
            self._unreadable = True
            return
        for data in events:
            self._try_read(self._reader.event, data)

    def _try_read(self, read: Callable[[bytes], None], data: bytes) -> None:
        try:
            read(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest):
            self._unreadable = True
