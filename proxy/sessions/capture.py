"""Capture without configuration: with a project's key, sessions open by themselves.

A call belongs to the session of its conversation: by the harness's own conversation header where there is one, else by
the handles of its last assistant turn, else by the recent captured session whose recorded calls the request continues,
else to a new session. Headers and handles are hints of which conversation a call belongs to *within one project*; they
never lead to another key's sessions.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from rolltap.calllog.base import CallLog
from rolltap.contract.keys import key_hash
from rolltap.ids import new_id
from rolltap.proxy.conversation.chat import ChatRequest
from rolltap.proxy.sessions.session_cache import LiveSession, SessionCache
from rolltap.tenants import tenant_tags
from rolltap.types import Session

if TYPE_CHECKING:
    from rolltap.proxy.call.policies import Policies
    from rolltap.proxy.sessions.key_accounts import KeyAccounts

RECENT = 64
CAPTURED = "captured"
"""The tag of a session that opened by itself; its value is the dialect of the first call."""
PROJECT = "project"
"""The tag that names the minted project key of a captured session. Those of the settings' key have none."""


class Capture:
    """The sessions of the projects: each key's are its own. `secret` keeps their conversations' hashes unknown."""

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
        self, chat: ChatRequest, project: str = "", policy: str | None = None, named: Sequence[str] = ()
    ) -> LiveSession:
        """The session of the request's conversation in the project ("": the settings' own), opened if it is new.

        With `policy` it is one of that policy; else of the one that the first call's model leads to. `named` are the
        calls that the request's handles name.
        """
        conversation = chat.hints.conversation
        if conversation:
            live = await self._named(chat, conversation, project, policy)
        else:
            live = await self._made(named, project) or self._continued(chat, project, policy)
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

    async def maker(self, call_id: str | None, project: str = "") -> LiveSession | None:
        """The project's captured session that made a call; None if there is none, or if it has ended."""
        session = await self._log.session_of(call_id) if call_id is not None else None
        if session is None or CAPTURED not in session.tags or not _is_open(session):
            return None
        if session.tags.get(PROJECT, "") != project:
            return None
        live = await self._live.adopt(session)
        live.account = self._accounts.of(project)
        return live

    async def _made(self, call_ids: Sequence[str], project: str) -> LiveSession | None:
        """The open session that made one of these calls; the store is asked for what no recent session made."""
        for call_id in dict.fromkeys(call_ids):
            recent = (live for live in self._recent[project].values() if call_id in live.forest.nodes)
            live = next(recent, None) or await self.maker(call_id, project)
            if live is not None and _is_open(live.session):
                return live
        return None

    async def _named(self, chat: ChatRequest, conversation: str, project: str, policy: str | None) -> LiveSession:
        """The session of a conversation that the harness names; a new one where the former has ended."""
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
            if session is None:  # a harness's first calls come together, perhaps to several proxies
                session = await self._log.claim_session(self._new(chat, hashed, project, policy))
            if _is_open(session):
                return await self._live.adopt(session)
        raise AssertionError("unreachable")

    def _continued(self, chat: ChatRequest, project: str, policy: str | None) -> LiveSession | None:
        """The recent session that holds the longest beginning of this conversation, if any holds a turn of it."""
        best: tuple[int, LiveSession] | None = None
        for live in reversed(self._recent[project].values()):
            if not _is_open(live.session) or (policy is not None and live.session.policy != policy):
                continue
            bound = live.session.policy
            outline = live.forest.outline(bound, chat, self._policies[bound].source.effort(chat))
            match = live.forest.find(outline, [])
            if match.context is not None and (best is None or match.covered > best[0]):
                best = (match.covered, live)
        return best[1] if best else None

    def _new(self, chat: ChatRequest, hashed: str, project: str, policy: str | None) -> Session:
        self._accounts.check_opens(project)
        now = time.time()
        tags = {CAPTURED: chat.dialect, "model": chat.model} | ({PROJECT: project} if project else {}) | tenant_tags()
        bound = policy or self._policies.for_model(chat.model)
        return Session(new_id(), bound, hashed, now, now + self._ttl, tags=tags)


def _is_open(session: Session) -> bool:
    return session.closed_at is None and session.expires_at > time.time()
