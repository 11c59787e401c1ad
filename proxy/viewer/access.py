"""Who may see the pages: a one-time link gives a browser a cookie.

Links and cookies are signed with the server's secret and the settings' keys, so every process of a server takes them,
and a new key in the settings ends them all. One that a minted key made names that key, and ends with it. A link works
once in the process that redeems it and for `LINK_S`; a cookie is HttpOnly and SameSite=Strict. What a cookie may add
(notes, where an admin's key or the server itself made the link) needs its form token, too: pages of other ports of this
machine send the cookie along, but they can't read the token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from rolltap.errors import Forbidden
from rolltap.proxy.access import READ
from rolltap.proxy.sessions.keys import Keyring

LINK_S = 15 * 60
COOKIE_S = 7 * 86_400


class Access:
    """Makes and checks links and cookies. `clock` gives seconds since the epoch."""

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = hashlib.sha256(f"viewer\0{secret}".encode()).digest()
        self._clock = clock
        self._used: dict[str, float] = {}
        self.cookie = f"rolltap_{hashlib.sha256(self._secret).hexdigest()[:8]}"
        """The cookie's name, of this server alone: browsers share cookies between the ports of a machine."""

    def new_link(self, key_id: str = "") -> str:
        """The token of a link that works once, made with the key `key_id`; "": by the server itself."""
        return self._signed("link", LINK_S, key_id)

    def redeem(self, token: str) -> str | None:
        """A cookie for a link's token; None if it is wrong, over, or used before."""
        now = self._clock()
        self._used = {used: until for used, until in self._used.items() if until > now}
        if not self._holds("link", token) or token in self._used:
            return None
        self._used[token] = now + LINK_S
        return self._signed("cookie", COOKIE_S, _key_id(token))

    def holder(self, cookie: str | None) -> str | None:
        """The id of the key that a cookie comes from, "" for the server itself; None if it is wrong or over."""
        return _key_id(cookie) if cookie is not None and self._holds("cookie", cookie) else None

    def form_token(self, cookie: str) -> str:
        """What a page sends with what it adds, beside its cookie."""
        return self._signature("form", cookie)

    def is_form(self, cookie: str, token: str) -> bool:
        """Whether a page of this server that has the cookie made the request."""
        return hmac.compare_digest(token.encode(), self.form_token(cookie).encode())

    def _signed(self, use: str, lifetime: float, key_id: str) -> str:
        body = f"{int(self._clock() + lifetime)}.{secrets.token_urlsafe(12)}.{key_id}"
        return f"{body}.{self._signature(use, body)}"

    def _holds(self, use: str, token: str) -> bool:
        body, _, signature = token.rpartition(".")
        expires = body.partition(".")[0]
        is_genuine = hmac.compare_digest(signature.encode(), self._signature(use, body).encode())
        return is_genuine and expires.isdecimal() and float(expires) > self._clock()

    def _signature(self, use: str, body: str) -> str:
        return hmac.new(self._secret, f"{use}\0{body}".encode(), hashlib.sha256).hexdigest()[:40]


def _key_id(token: str) -> str:
    """The id of the key in a token that holds."""
    return token.split(".")[2]


class Viewers:
    """The keys that may see the pages, and make links to them. Without a `keyring` there is no plane and no key."""

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring

    async def key_id(self, key: str) -> str | None:
        """The id of a key; None if it may not."""
        caller = await self._keyring.caller(key) if self._keyring is not None else None
        if caller is not None and not caller.of_deployment:
            raise Forbidden(
                f"the pages show the default tenant's record, and the key is of tenant {caller.tenant!r}: read by "
                "`rolltap.open` or `GET /read/...`"
            )
        return caller.id if caller is not None and caller.role in READ else None

    async def go_on(self, key_id: str) -> bool:
        """Whether the key still works; "" stands for the server itself, which does."""
        return not key_id or (self._keyring is not None and await self._keyring.works(key_id))

    async def may_note(self, key_id: str) -> bool:
        """Whether links of the key may add notes: an admin's, and the server's own."""
        return not key_id or (self._keyring is not None and await self._keyring.role(key_id) == "admin")
