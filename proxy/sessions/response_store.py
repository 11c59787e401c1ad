"""Recorded replies that clients refer to by handle instead of resending them, read from the call log."""

from __future__ import annotations

import time

from rolltap.calllog.facts import CallCompletion, CallLog
from rolltap.decoding import convert, from_json
from rolltap.errors import NotFound
from rolltap.protocols.base import Dialect, RecordedCall
from rolltap.protocols.conversation import ChatRequest, Choice, Message, ReplyEnded, ReplyStarted, Usage
from rolltap.protocols.handles import MAX_POSITION, Handles
from rolltap.proxy.call.policies import Policies
from rolltap.proxy.sessions.live_sessions import LiveSession, SessionCache
from rolltap.types import Finish, Outcome


class ResponseStore:
    """Looks up handles. Finds only calls of the request's own session.

    `wait_s`: how long a call is waited for that another proxy may have.
    """

    def __init__(
        self, call_log: CallLog, sessions: SessionCache, handles: Handles, policies: Policies, wait_s: float
    ) -> None:
        self._log = call_log
        self._sessions = sessions
        self._handles = handles
        self._policies = policies
        self._wait_s = wait_s

    def named(self, chat: ChatRequest) -> str | None:
        """The id of the call whose reply the request refers to instead of resending it."""
        recalled = (message.handle for message in chat.messages if message.recall)
        return self.call_of(chat.previous or next(recalled, None))

    def last_named(self, chat: ChatRequest) -> list[str]:
        """The ids of the calls that produced the request's last assistant message, by its handles."""
        return self._handles.last_named(chat)

    def call_of(self, handle: str | None) -> str | None:
        """The call id in a handle; None if rolltap did not mint the handle."""
        return self._handles.read(handle)

    async def fill(self, dialect: Dialect, live: LiveSession, chat: ChatRequest) -> ChatRequest:
        """The request with its complete history.

        Raises `InvalidRequest` if it refers to a reply that is unknown, or of another dialect.
        """

        async def find(handle: str) -> RecordedCall | None:
            call_id = self._handles.read(handle)
            if call_id is not None and live.forest.call(call_id) is None:
                await self._load(live, call_id)
            node = live.forest.nodes.get(call_id) if call_id else None
            if node is None or node.reply is None or node.dialect != dialect.name:
                return None
            if chat.previous is None:  # a message in its place; only a chain of replies needs their requests
                return RecordedCall(chat, node.reply)
            return RecordedCall(await self._request(dialect, node.call_id), node.reply)

        return await dialect.recall(chat, find)

    async def _load(self, live: LiveSession, call_id: str) -> None:
        """Loads a call that another proxy may have recorded. Raises `StoreUnavailable` if that one may still have it
        outside the store: it is not to be called unknown then."""

        async def is_known(_: bool) -> bool:
            return live.forest.call(call_id) is not None

        await self._sessions.read_until(live, is_known, time.monotonic(), self._wait_s)

    async def reply(
        self, dialect: Dialect, live: LiveSession, handle: str
    ) -> tuple[ChatRequest, ReplyStarted, ReplyEnded]:
        """The request and reply of a completed call. Raises `NotFound` if its client asked not to store it."""
        call_id = self._handles.read(handle)
        known = live.forest.completed - {call_id}  # rows that this process knows already are not read
        rows = await self._log.rows(live.session.id, known=known) if call_id is not None else ()
        row = next((row for row in rows if row.intent.id == call_id), None)
        intent, done = (row.intent, row.completion) if row is not None else (None, None)
        if intent is None or done is None or done.outcome is not Outcome.COMPLETED or intent.dialect != dialect.name:
            raise NotFound(f"no completed reply {handle!r} is on record in this session")
        request = await self._request(dialect, intent.id)
        if not request.stored:
            raise NotFound(f"the reply {handle!r} was asked for with `store: false`")
        name = self._handles.mint(intent.id, MAX_POSITION)
        usage = convert(done.usage, Usage)
        started = ReplyStarted(intent.id, int(intent.created_at), request.model, usage.prompt, name)
        return request, started, ReplyEnded((self._choice(intent.policy, done, request),), usage)

    def _choice(self, policy_name: str, done: CallCompletion, request: ChatRequest) -> Choice:
        logprobs = None
        if request.sampling.logprobs:
            source = self._policies[policy_name].source
            logprobs = source.token_logprobs(done.output_ids.tolist(), done.logprobs.tolist())
        finish = "length" if done.finish is Finish.LENGTH else "stop"
        return Choice(from_json(done.message, Message), finish, logprobs=logprobs)

    async def _request(self, dialect: Dialect, call_id: str) -> ChatRequest:
        """The call's request, parsed again."""
        parts = await self._log.request(call_id)
        return dialect.parse_recorded(parts.head, parts.items, parts.fixed)
