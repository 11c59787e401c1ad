"""The one path of a call.

    bytes ─ Dialect.parse ─▶ ChatRequest ─ Continuation.plan ─▶ PromptPlan ─ Engine.sample ─▶ token chunks
                                                                                               │
    client ◀─ Dialect.writer (terminal event withheld) ◀─ ReplyParser ◀────────────────────────┤
                                                                                               ▼
                    Recorder: intent before the engine is asked, completion durable before the terminal event

Every call that reached an engine ends in exactly one completion: completed, aborted (the client went away), or
engine error. What can't be finished is cut off, never closed cleanly: some harnesses take a clean end for an answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import replace

from rolltap.crash import crash_point
from rolltap.errors import InvalidRequest, NotFound, RequestError, RolltapError
from rolltap.ids import new_id
from rolltap.proxy.call.http_exchange import BrokenReply, ClientGone, Exchange
from rolltap.proxy.call.in_flight import Sampler, Turn
from rolltap.proxy.call.policies import CapturePolicy, Policies, Policy
from rolltap.proxy.call.recorder import OpenCall, Recorder
from rolltap.proxy.call.streamed import StreamedReply
from rolltap.proxy.call.turn_cap import check_turn
from rolltap.proxy.call.versions import Versions
from rolltap.proxy.continuation.handles import Handles
from rolltap.proxy.conversation.chat import ChatRequest, ReplyStarted
from rolltap.proxy.dialects.base import Dialect, WireReply, WireRequest
from rolltap.proxy.engines.prompts import Prompts
from rolltap.proxy.sessions.capture import CAPTURED, Capture
from rolltap.proxy.sessions.response_store import Recalls
from rolltap.proxy.sessions.roles import in_role, roles_of
from rolltap.proxy.sessions.session_cache import LiveSession, LiveSessions
from rolltap.settings import LimitSettings
from rolltap.types import Outcome

log = logging.getLogger("rolltap.gateway")

JSON = {"content-type": "application/json"}


class Gateway:
    """Serves the agent plane's model calls."""

    def __init__(
        self,
        sessions: LiveSessions,
        capture: Capture,
        policies: Policies,
        recorder: Recorder,
        recalls: Recalls,
        handles: Handles,
        limits: LimitSettings,
        versions: Versions,
    ) -> None:
        self._sessions = sessions
        self._capture = capture
        self._policies = policies
        self._recorder = recorder
        self._recalls = recalls
        self._handles = handles
        self._limits = limits
        self._prompts = Prompts()
        self._sampler = Sampler(recorder, handles, versions)

    async def generate(self, dialect: Dialect, wire: WireRequest, exchange: Exchange) -> None:
        """Answers one model call; every error in the dialect's own shape."""
        live: LiveSession | None = None
        turn: Turn | None = None
        try:
            live = await self._known(dialect, wire)
            chat = dialect.parse(wire)
            live = live or await self._captured(chat)
            chat = in_role(live.session, await self._recalls.fill(dialect, live, chat))
            policy = self._policy(live, chat)
            policy.check(chat)
            live.enter(self._limits.calls_at_once)
            try:
                turn = await self._turn(live, chat, policy, wire.body)
                await self._answer(dialect, turn, exchange)
            finally:
                live.leave()
        except ClientGone:
            return
        except RolltapError as error:
            if live is not None and turn is None and isinstance(error, RequestError):
                await self._recorder.refuse(live.session.id, live.session.policy, dialect.name, wire.body, error)
            if exchange.started:
                raise BrokenReply(str(error)) from error
            await exchange.reply(dialect.error(error))

    async def refuse(self, dialect: Dialect, wire: WireRequest, error: RequestError) -> None:
        """Records a model call whose body did not come, under its key's session. An unknown key is an error first."""
        live = await self._known(dialect, wire)
        if live is not None:
            await self._recorder.refuse(live.session.id, live.session.policy, dialect.name, wire.body, error)

    async def count_tokens(self, dialect: Dialect, wire: WireRequest, exchange: Exchange) -> None:
        """How many tokens the request's prompt would have; samples and records nothing."""
        live = await self._known(dialect, wire)
        chat = dialect.parse(wire)
        live = live or await self._captured(chat)
        chat = await self._recalls.fill(dialect, live, chat)
        policy = self._policy(live, chat)
        if isinstance(policy, CapturePolicy):
            raise InvalidRequest(f"the model {chat.model!r} is behind a chat API; its tokens can't be counted here")
        async with live.planning:
            plan = await policy.plan("", live.forest, chat)
        await exchange.reply(WireReply(200, dialect.token_count(len(plan.prompt_ids)), JSON))

    async def models(self, dialect: Dialect, wire: WireRequest, exchange: Exchange) -> None:
        """The models that this key may ask for."""
        live = await self._known(dialect, wire)
        roles = roles_of(live.session) if live is not None else {}
        names = [*roles, *self._policies.served(live.session.policy)] if live is not None else self._policies.names
        await exchange.reply(WireReply(200, dialect.models(names, wire.path_params.get("model")), JSON))

    async def retrieve(self, dialect: Dialect, wire: WireRequest, exchange: Exchange) -> None:
        """A recorded reply as it was delivered, for the session that it was made for."""
        for name in wire.query:
            raise InvalidRequest(f"{name}: a recorded reply is given whole, as it was delivered", param=name)
        live = await self._known(dialect, wire)
        reply = wire.path_params["reply"]
        live = live or await self._capture.maker(self._handles.read(reply))
        if live is None:
            raise NotFound(f"no completed reply {reply!r} is on record")
        request, started, ended = await self._recalls.reply(dialect, live, reply)
        await exchange.reply(WireReply(200, dialect.reply(request, started, ended), JSON))

    async def _known(self, dialect: Dialect, wire: WireRequest) -> LiveSession | None:
        """The session of the request's key; None for the project's key, whose sessions follow from the calls."""
        key = dialect.key(wire)
        return None if self._capture.owns(key) else await self._sessions.enter(key, wire.path_params.get("session"))

    async def _captured(self, chat: ChatRequest) -> LiveSession:
        """The session of a call under the project's key: of the reply that it names, else of its conversation."""
        return await self._capture.maker(self._recalls.named(chat)) or await self._capture.session(chat)

    def _policy(self, live: LiveSession, chat: ChatRequest) -> Policy:
        session = live.session
        if (played := roles_of(session).get(chat.model)) is not None:
            return self._policies[played]
        return self._policies.resolve(chat.model, session.policy, captured=CAPTURED in session.tags)

    async def _turn(self, live: LiveSession, chat: ChatRequest, policy: Policy, body: bytes) -> Turn:
        """The turn that answers this request: an SDK's marked retry gets the one it repeats, any other a new one."""
        body_hash = hashlib.sha256(body).hexdigest()
        known = live.turns.get(body_hash) if chat.hints.retry else None
        if known is not None and known.error is None:
            return known
        turn = Turn(chat, live, policy, body_hash)
        await self._begin(turn)
        live.keep(turn)
        turn.task = asyncio.create_task(self._sampler.run(turn))
        return turn

    async def _begin(self, turn: Turn) -> None:
        """Plans the prompt and writes the intents; from here on the forest knows the calls.

        Where the upstream renders the prompt, the intent is written when it has said what it rendered.
        """
        live, chat, policy = turn.live, turn.chat, turn.policy
        async with live.planning:
            call_id = new_id()
            plan = await policy.plan(call_id, live.forest, chat)
            if policy.lineages.may_lack_parent(plan, live.forest, chat) and await self._sessions.refresh(live):
                plan = await policy.plan(call_id, live.forest, chat)
            check_turn(live, plan.parent)
            prompt = self._prompts.make(call_id, plan.prompt_ids, plan.parent and plan.parent.call_id)
            for _ in range(chat.sampling.n):
                if plan.break_ is not None:
                    plan = replace(plan, break_=replace(plan.break_, call_id=call_id))
                request = policy.sample_request(call_id, live.session.id, chat, prompt)
                node = plan.node(call_id, chat.items)
                turn.calls.append(OpenCall(call_id, node, plan, request, prompt, time.time()))
                call_id = new_id()
            for call in turn.calls:
                live.forest.add(call.node)
        if isinstance(policy, CapturePolicy):
            return
        try:
            await self._sampler.open(turn)
        except BaseException:
            for call in turn.calls:
                live.forest.complete(call.node, call.node.output_ids, None, Outcome.ABORTED)
            raise

    async def _answer(self, dialect: Dialect, turn: Turn, exchange: Exchange) -> None:
        """Streams what the turn says as it says it; the end only when the turn is durable."""
        started = turn.started(self._handles)
        stream = StreamedReply(exchange, dialect.writer(turn.chat), started) if turn.chat.stream else None
        turn.readers += 1
        try:
            async with exchange.while_connected():
                async for event in turn.follow(self._limits.keep_alive_s):
                    if stream is None:
                        continue
                    if event is None:
                        await stream.keep_alive()
                    else:
                        await stream.say(event)
                        crash_point("reply.part")
        except ClientGone:
            await self._left(turn)
            raise
        except RolltapError:
            turn.live.drop(turn)
            raise
        await self._release(dialect, turn, exchange, stream, started)

    async def _left(self, turn: Turn) -> None:
        """A client went away. A turn that only had to be recorded has missed it, and waits for a retry."""
        if turn.leave() and turn.task is not None:
            await asyncio.wait([turn.task])
            if turn.readers == 0 and turn.ended is not None:
                self._recorder.delivered(turn.calls, False)

    async def _release(
        self, dialect: Dialect, turn: Turn, exchange: Exchange, stream: StreamedReply | None, started: ReplyStarted
    ) -> None:
        """The terminal bytes, now that the call is durable. An undelivered turn is kept for the client's retry."""
        assert turn.ended is not None
        if stream is None:
            await exchange.reply(WireReply(200, dialect.reply(turn.chat, started, turn.ended), JSON))
        else:
            await stream.end(turn.ended)
        crash_point("reply.end")
        if not exchange.gone:
            turn.live.drop(turn)
        self._recorder.delivered(turn.calls, not exchange.gone)
