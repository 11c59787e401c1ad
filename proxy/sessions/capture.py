"""Capture without configuration: sessions open automatically for calls with a project key.

A call belongs to the session of its conversation. The first of these that applies decides: the harness's conversation
header; the handles in the request's last assistant message; a recent captured session whose calls the request
continues (of several with equal replies, one where no call follows the reply yet). Otherwise a new session opens.
Headers and handles only select a session *within one project*; they never lead to sessions of another key.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from rolltap.calllog.facts import CallLog
from rolltap.contract.keys import key_hash
from rolltap.contract.tags import CAPTURED, PROJECT
from rolltap.ids import new_id
from rolltap.protocols.conversation import ChatRequest
from rolltap.proxy.continuation.forest import Match
from rolltap.proxy.sessions.live_sessions import LiveSession, SessionCache
from rolltap.tenants import tenant_tags
from rolltap.types import Session

if TYPE_CHECKING:
    from rolltap.proxy.call.policies import Policies
    from rolltap.proxy.sessions.key_accounts import KeyAccounts

RECENT = 64


class Capture:
    """Finds or opens the sessions of project keys. `secret` keeps clients from guessing the hash of a conversation."""

    def __init__(
        self,
        secret: str,
        call_log: CallLog,
        live: SessionCache,
        policies: Policies,
        ttl: float,
        accounts: KeyAccounts,
    ) -> None:
        self._secret = secret
        self._log = call_log
        self._live = live
        self._policies = policies
        self._ttl = ttl
        self._accounts = accounts
        self._recent: defaultdict[str, OrderedDict[str, LiveSession]] = defaultdict(OrderedDict)  # by project

    async def session(
        self, chat: ChatRequest, project: str = "", policy: str | None = None, call_ids: Sequence[str] = ()
    ) -> LiveSession:
        """The session of the request's conversation in the project, opened if it is new.

        `project` "" is the settings' project key. Without `policy` the model of the first call decides the policy.
        `call_ids` are the calls that the request's handles identify.
        """
        conversation = chat.hints.conversation
        if conversation:
            live = await self._by_header(chat, conversation, project, policy)
        else:
            live = await self._by_handles(call_ids, project) or self._by_prefix(chat, project, policy)
        if live is None:
            session = self._new(chat, key_hash(f"{self._secret}\0{secrets.token_hex(16)}"), project, policy)
            await self._log.open_session(session)
            live = await self._live.adopt(session)
        live.account = self._accounts.of(project)
        recent = self._recent[project]
        recent[live.session.id] = live
        recent.move_to_end(live.session.id)
        if len(recent) > RECENT:
            recent.popitem(last=False)
        return live

    async def session_of_call(self, call_id: str | None, project: str = "") -> LiveSession | None:
        """The project's captured session that contains a call; None if there is none, or if it has ended."""
        session = await self._log.session_of(call_id) if call_id is not None else None
        if session is None or CAPTURED not in session.tags or not _is_open(session, self._live.now()):
            return None
        if session.tags.get(PROJECT, "") != project:
            return None
        live = await self._live.adopt(session)
        live.account = self._accounts.of(project)
        return live

    async def _by_handles(self, call_ids: Sequence[str], project: str) -> LiveSession | None:
        """The open session that contains one of these calls. Looks in the recent sessions, then in the store."""
        for call_id in dict.fromkeys(call_ids):
            recent = (live for live in self._recent[project].values() if call_id in live.forest.nodes)
            live = next(recent, None) or await self.session_of_call(call_id, project)
            if live is not None and _is_open(live.session, self._live.now()):
                return live
        return None

    async def _by_header(self, chat: ChatRequest, conversation: str, project: str, policy: str | None) -> LiveSession:
        """The session of the conversation in the harness's header; a new one if the previous one has ended."""
        for turn in count():
            identity = (
                self._secret,
                *([project] if project else []),
                chat.dialect,
                policy or "",
                conversation,
                str(turn),
            )
            hashed = hashlib.sha256("\0".join(identity).encode()).hexdigest()
            session = await self._log.session_by_key(hashed)
            if session is None:  # a harness may send its first calls at once, to several proxies
                session = await self._log.claim_session(self._new(chat, hashed, project, policy))
            if _is_open(session, self._live.now()):
                return await self._live.adopt(session)
        raise AssertionError("unreachable")

    def _by_prefix(self, chat: ChatRequest, project: str, policy: str | None) -> LiveSession | None:
        """The recent session with the longest prefix of this conversation, if one contains a reply of it.

        Conversations that run in parallel may read the same so far: of equal ones `_preference` decides.
        """
        matches: list[tuple[LiveSession, Match]] = []
        for live in reversed(self._recent[project].values()):
            if not _is_open(live.session, self._live.now()) or (policy is not None and live.session.policy != policy):
                continue
            bound = live.session.policy
            outline = live.forest.outline(bound, chat, self._policies[bound].source.effort(chat))
            match = live.forest.find(outline, [])
            if match.context is not None:
                matches.append((live, match))
        longest = max((match.covered for _, match in matches), default=0)
        equal = [(live, match) for live, match in matches if match.covered == longest]
        if len(equal) > 1:
            return max(equal, key=lambda one: _preference(*one, is_retry=bool(chat.hints.retry)))[0]
        return equal[0][0] if equal else None

    def _new(self, chat: ChatRequest, hashed: str, project: str, policy: str | None) -> Session:
        self._accounts.check_opens(project)
        now = self._live.now()
        tags = {CAPTURED: chat.dialect, "model": chat.model} | ({PROJECT: project} if project else {}) | tenant_tags()
        bound = policy or self._policies.for_model(chat.model)
        return Session(new_id(), bound, hashed, now, now + self._ttl, tags=tags)


def _is_open(session: Session, now: float) -> bool:
    return session.closed_at is None and session.expires_at > now


def _preference(live: LiveSession, match: Match, *, is_retry: bool) -> tuple[int, bool, bool, int]:
    """Orders sessions in which a request continues equal replies.

    A retry belongs where its request is. Another call belongs where no call continues the reply yet; a call that is
    admitted and not yet placed counts in flight, but is not in the forest. A failed call's request may be repeated.
    """
    is_continued = match.context is not None and live.forest.is_continued(match.context)
    return match.proven if is_retry else 0, not is_continued, live.in_flight == 0, match.proven
