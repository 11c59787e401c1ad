"""The agent plane's requests that are not model calls: token counts, models, recorded replies.

They are not recorded.
"""

from __future__ import annotations

from rolltap.contract.tags import roles_of
from rolltap.errors import InvalidRequest, NotFound
from rolltap.protocols.base import Dialect, WireReply, WireRequest
from rolltap.proxy.call.admission import Admission
from rolltap.proxy.call.budget import count_body
from rolltap.proxy.call.http_exchange import HttpExchange
from rolltap.proxy.call.policies import Policies
from rolltap.proxy.call.policy import Arrival
from rolltap.proxy.call.reply import JSON
from rolltap.proxy.sessions.response_store import ResponseStore


class Queries:
    """Answers these requests, or forwards them to the vendor of the request."""

    def __init__(self, admission: Admission, policies: Policies, responses: ResponseStore) -> None:
        self._admission = admission
        self._policies = policies
        self._responses = responses

    async def count_tokens(self, dialect: Dialect, wire: WireRequest, http: HttpExchange) -> None:
        """Counts the tokens of the request's prompt without sampling."""
        if await self._forwarded(dialect, wire, http):
            return
        arrival = Arrival(dialect, wire)
        try:
            await self._admission.admit(arrival)
        finally:
            count_body(arrival)
            http.release_room()
        async with arrival.session.planning:
            count = await arrival.policy.source.count_tokens(arrival.session.forest, arrival.request)
        await http.reply(WireReply(200, dialect.token_count(count), JSON))

    async def models(self, dialect: Dialect, wire: WireRequest, http: HttpExchange) -> None:
        """Lists the models that this key may ask for."""
        if await self._forwarded(dialect, wire, http):
            return
        names = self._policies.names
        identity = await self._admission.identify(dialect, wire)
        if (live := identity.session) is not None:
            names = [*roles_of(live.session), *self._policies.served(live.session.policy)]
            policies = {name: self._policies.of_session(live.session, name) for name in names}
        else:
            policies = {name: self._policies[name] for name in names}
        contexts = {name: policy.context for name, policy in policies.items() if policy.context}
        await http.reply(WireReply(200, dialect.models(names, wire.path_params.get("model"), contexts), JSON))

    async def retrieve(self, dialect: Dialect, wire: WireRequest, http: HttpExchange) -> None:
        """Returns a recorded reply as it was delivered, to its own session only."""
        route = await self._admission.vendor_route(dialect, wire)
        if route is not None and route.vendor.engine.keyed:  # many sessions share the vendor's account
            raise NotFound("what a vendor stores under the settings' key can't be read here")
        if route is not None:
            await route.vendor.forward(wire, http)
            return
        for name in wire.query:
            raise InvalidRequest(f"{name}: not supported: a recorded reply is returned complete", param=name)
        reply = wire.path_params["reply"]
        identity = await self._admission.identify(dialect, wire)
        live = identity.session or await self._admission.session_of_reply(reply, identity.project)
        if live is None:
            raise NotFound(f"no completed reply {reply!r} is on record")
        request, started, ended = await self._responses.reply(dialect, live, reply)
        await http.reply(WireReply(200, dialect.reply(request, started, ended), JSON))

    async def _forwarded(self, dialect: Dialect, wire: WireRequest, http: HttpExchange) -> bool:
        route = await self._admission.vendor_route(dialect, wire)
        if route is not None:
            await route.vendor.forward(wire, http)
        return route is not None
