"""Whose requests go to a vendor, and under which session.

A key that is not rolltap's is the user's own: its request goes to the vendor of its protocol, under the session that a
URL prefix names, else under that of its conversation. Where a vendor's settings hold a key,
that one is used, and a key of rolltap's says who may. A key of rolltap's never reaches a vendor, and a vendor's key
never the store, not even as a hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.proxy.call.policies import PassthroughPolicy, Policies
from rolltap.proxy.dialects.base import Dialect, WireRequest
from rolltap.proxy.sessions.capture import Capture
from rolltap.proxy.sessions.keys import Keyring
from rolltap.proxy.sessions.session_cache import LiveSession, LiveSessions

OUR_PREFIX = "rt-"
"""Every key that rolltap makes begins with this."""


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """A request that goes to `policy`'s vendor. `live` is its session; None: it follows from the conversation."""

    policy: PassthroughPolicy
    live: LiveSession | None = None


class Access:
    """Decides on every request of the agent plane where vendors are served.

    `unnamed`: a vendor's key may come without a session's URL prefix, which is for this machine's own users only.
    """

    def __init__(
        self, sessions: LiveSessions, capture: Capture, policies: Policies, keyring: Keyring, *, unnamed: bool
    ) -> None:
        self._sessions = sessions
        self._capture = capture
        self._policies = policies
        self._keyring = keyring
        self._unnamed = unnamed
        self._vendors = [policy for policy in policies if isinstance(policy, PassthroughPolicy)]

    async def grant(self, dialect: Dialect, wire: WireRequest) -> Grant | None:
        """Where the request is relayed to; None if it is not to be."""
        key = dialect.key(wire) if self._vendors and dialect.reply_reader is not None else None
        if key is None:
            return None
        protocol = protocol_of(dialect.name, wire.headers)
        named = wire.path_params.get("session")
        if self._is_ours(key):
            return await self._under_our_key(key, named, protocol)
        if named is not None:
            live = await self._sessions.named(named)
            return _granted(self._policies[live.session.policy], protocol, live, keyed=False)
        return self._first(protocol, keyed=False) if self._unnamed else None

    async def _under_our_key(self, key: str, named: str | None, protocol: str) -> Grant | None:
        """Under the project's key vendors are reached where nothing else is served."""
        if self._capture.owns(key):
            if len(self._vendors) < len(self._policies.names):
                return None
            policy, grant = self._vendors[0], self._first(protocol, keyed=True)
        else:
            live = await self._sessions.enter(key, named)
            policy = self._policies[live.session.policy]
            grant = _granted(policy, protocol, live, keyed=True)
        if grant is None and isinstance(policy, PassthroughPolicy):
            raise policy.refusal()
        return grant

    def _first(self, protocol: str, *, keyed: bool) -> Grant | None:
        grants = (_granted(policy, protocol, None, keyed=keyed) for policy in self._vendors)
        return next((grant for grant in grants if grant is not None), None)

    def _is_ours(self, key: str) -> bool:
        return key.startswith(OUR_PREFIX) or self._capture.owns(key) or self._keyring.role(key) is not None


def _granted(policy: object, protocol: str, live: LiveSession | None, *, keyed: bool) -> Grant | None:
    if not isinstance(policy, PassthroughPolicy) or policy.engine.keyed is not keyed:
        return None
    return Grant(policy, live) if protocol in policy.engine.dialects else None


def protocol_of(dialect: str, headers: Mapping[str, str]) -> str:
    """The protocol that a request speaks: the list of models is one path in three."""
    if "anthropic-version" in headers or "x-api-key" in headers:
        return "anthropic"
    return "gemini" if "x-goog-api-key" in headers else dialect
