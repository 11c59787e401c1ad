"""Who a request of the agent plane is from, and which policy answers it.

A session's key names the session. A project's key opens sessions by itself, by the conversation. A key that is not
rolltap's is the user's own: its request goes to the vendor of its protocol, under the session that a URL prefix names,
else under that of its conversation. Where a vendor's settings hold a key, that one is used, and a key of rolltap's says
who may. A key of rolltap's never reaches a vendor, and a vendor's key never the store, not even as a hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from rolltap.errors import RequestError
from rolltap.proxy.call.arrival import Arrival
from rolltap.proxy.call.body_reader import BodyReader
from rolltap.proxy.call.budget import BodySender
from rolltap.proxy.call.policies import Policies
from rolltap.proxy.call.sources.passthrough import PassthroughSource
from rolltap.proxy.conversation.chat import ChatRequest, Message, Text
from rolltap.proxy.dialects.base import Dialect, WireRequest
from rolltap.proxy.dialects.hints import read_hints
from rolltap.proxy.sessions.capture import Capture
from rolltap.proxy.sessions.keys import Keyring
from rolltap.proxy.sessions.response_store import ResponseStore
from rolltap.proxy.sessions.roles import in_role
from rolltap.proxy.sessions.session_cache import LiveSession, SessionCache
from rolltap.tenants import DEFAULT_TENANT, act_for

OUR_PREFIX = "rt-"
"""Every key that rolltap makes begins with this."""


@dataclass(frozen=True, slots=True, eq=False)
class VendorRoute:
    """A request that goes to `policy`'s vendor. `session` None: it follows from the conversation."""

    policy: str
    vendor: PassthroughSource
    session: LiveSession | None = None
    project: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Vendors:
    """The passthrough policies' sources, by policy.

    `unnamed`: a vendor's key may come without a session's URL prefix, which is for this machine's own users only.
    """

    sources: Mapping[str, PassthroughSource]
    unnamed: bool


class Admission:
    """Admits requests."""

    def __init__(
        self,
        sessions: SessionCache,
        capture: Capture,
        policies: Policies,
        responses: ResponseStore,
        keyring: Keyring,
        vendors: Vendors,
    ) -> None:
        self._sessions = sessions
        self._capture = capture
        self._policies = policies
        self._responses = responses
        self._keyring = keyring
        self._vendors = vendors.sources
        self._unnamed = vendors.unnamed
        self._bodies = BodyReader()

    async def admit(self, arrival: Arrival) -> None:
        """Fills in session, request and policy. A `RequestError` that comes with a session is that session's."""
        relay = await self.relay(arrival.dialect, arrival.wire)
        if relay is not None:
            arrival.account = self._keyring.accounts.of(relay.project)
            request = await self._bodies.read(arrival, read_request)
            arrival.policy = self._policies[relay.policy]
            relay.vendor.check_model(request.model, arrival.policy.settings.aliases)
            arrival.take_session(relay.session or await self._capture.session(request, relay.project, relay.policy))
            arrival.request = request
            return
        admitted = await self.session(arrival.dialect, arrival.wire)
        if isinstance(admitted, str):
            arrival.account = self._keyring.accounts.of(admitted)
        else:
            arrival.take_session(admitted)
        request = await self._bodies.read(arrival, parse_request)
        session = await self._captured(request, admitted) if isinstance(admitted, str) else admitted
        if session is not admitted:
            arrival.take_session(session)
        arrival.request = in_role(session.session, await self._responses.fill(arrival.dialect, session, request))
        arrival.policy = self._policies.of_session(session.session, arrival.request.model)
        if arrival.policy.name in self._vendors:
            raise self._vendors[arrival.policy.name].refusal()

    async def enter(self, dialect: Dialect, wire: WireRequest) -> BodySender:
        """Whose a request is by its head, which has no body yet. No key: an error."""
        relay = await self.relay(dialect, wire)
        admitted = relay.session if relay is not None else await self.session(dialect, wire)
        if isinstance(admitted, str):
            return BodySender(None, self._keyring.accounts.of(admitted))
        return BodySender(admitted, self._keyring.accounts.of(relay.project) if relay is not None else None)

    async def session(self, dialect: Dialect, wire: WireRequest) -> LiveSession | str:
        """The session of the request's key; for a project's key its `project`: sessions follow from the calls."""
        key = dialect.key(wire)
        project = await self._project(key)
        return project if project is not None else await self._sessions.enter(key, wire.path_params.get("session"))

    async def maker(self, reply: str, project: str) -> LiveSession | None:
        """The project's captured session that made the reply which a handle names; None if there is none."""
        return await self._capture.maker(self._responses.call_of(reply), project)

    async def _project(self, key: str | None) -> str | None:
        """The project of a project's key, "" for that of the settings; None for any other key."""
        caller = await self._keyring.project(key)
        if caller is not None:
            act_for(caller.tenant)
        return None if caller is None else "" if caller.is_root else caller.id

    async def _captured(self, request: ChatRequest, project: str) -> LiveSession:
        """The session of a call under a project's key: of the reply that it names, else of its conversation."""
        maker = await self._capture.maker(self._responses.named(request), project)
        return maker or await self._capture.session(request, project, named=self._responses.last_named(request))

    async def relay(self, dialect: Dialect, wire: WireRequest) -> VendorRoute | None:
        """The vendor that the request goes to; None if it is not one for a vendor."""
        key = dialect.key(wire) if self._vendors and dialect.reply_reader is not None else None
        if key is None:
            return None
        protocol = protocol_of(dialect.name, wire.headers)
        named = wire.path_params.get("session")
        if self._is_ours(key):
            return await self._under_our_key(key, named, protocol)
        if named is not None:  # the session's own key: its id is no secret
            session = await self._sessions.enter(named, None)
            return self._to(session.session.policy, protocol, session, keyed=False)
        if not self._unnamed:
            return None
        act_for(DEFAULT_TENANT)  # a user of this machine
        return self._first(protocol, keyed=False)

    async def _under_our_key(self, key: str, named: str | None, protocol: str) -> VendorRoute | None:
        """Under a project's key vendors are reached where nothing else is served."""
        if (project := await self._project(key)) is not None:
            own = [policy for policy in self._vendors if policy in self._policies]
            if not own or len(own) < len(self._policies.names):
                return None
            policy, relay = own[0], self._first(protocol, keyed=True)
            relay = None if relay is None else replace(relay, project=project)
        else:
            session = await self._sessions.enter(key, named)
            policy = session.session.policy
            relay = self._to(policy, protocol, session, keyed=True)
        if relay is None and policy in self._vendors:
            raise self._vendors[policy].refusal()
        return relay

    def _first(self, protocol: str, *, keyed: bool) -> VendorRoute | None:
        relays = (self._to(policy, protocol, None, keyed=keyed) for policy in self._vendors)
        return next((relay for relay in relays if relay is not None), None)

    def _to(self, policy: str, protocol: str, session: LiveSession | None, *, keyed: bool) -> VendorRoute | None:
        vendor = self._vendors.get(policy) if policy in self._policies else None
        if vendor is None or vendor.engine.keyed is not keyed or protocol not in vendor.engine.dialects:
            return None
        return VendorRoute(policy, vendor, session)

    def _is_ours(self, key: str) -> bool:
        return key.startswith(OUR_PREFIX) or self._keyring.root(key) is not None


def protocol_of(dialect: str, headers: Mapping[str, str]) -> str:
    """The protocol that a request speaks: the list of models is one path in three."""
    if "anthropic-version" in headers or "x-api-key" in headers:
        return "anthropic"
    return "gemini" if "x-goog-api-key" in headers else dialect


def parse_request(dialect: Dialect, wire: WireRequest) -> ChatRequest:
    """A request that an engine of ours is to answer."""
    return dialect.parse(wire)


def read_request(dialect: Dialect, wire: WireRequest) -> ChatRequest:
    """A vendor's request as far as it can be read: the vendor may take what the dialect does not know."""
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
