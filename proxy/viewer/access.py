"""Who may see the pages: a one-time link gives a browser a cookie.

Links and cookies are signed with the server's secret and the admin key, so every process of a server takes them and a
new key ends them all. A link works once in the process that redeems it and for `LINK_S`; a cookie is HttpOnly and
SameSite=Strict and reads only, as there is nothing else on these pages.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

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

    def new_link(self) -> str:
        """The token of a link that works once."""
        return self._signed("link", LINK_S)

    def redeem(self, token: str) -> str | None:
        """A cookie for a link's token; None if it is wrong, over, or used before."""
        now = self._clock()
        self._used = {used: until for used, until in self._used.items() if until > now}
        if not self._holds("link", token) or token in self._used:
            return None
        self._used[token] = now + LINK_S
        return self._signed("cookie", COOKIE_S)

    def allows(self, cookie: str | None) -> bool:
        return cookie is not None and self._holds("cookie", cookie)

    def _signed(self, use: str, lifetime: float) -> str:
        body = f"{int(self._clock() + lifetime)}.{secrets.token_urlsafe(12)}"
        return f"{body}.{self._signature(use, body)}"

    def _holds(self, use: str, token: str) -> bool:
        body, _, signature = token.rpartition(".")
        expires = body.partition(".")[0]
        known = hmac.compare_digest(signature.encode(), self._signature(use, body).encode())
        return known and expires.isdecimal() and float(expires) > self._clock()

    def _signature(self, use: str, body: str) -> str:
        return hmac.new(self._secret, f"{use}\0{body}".encode(), hashlib.sha256).hexdigest()[:40]
