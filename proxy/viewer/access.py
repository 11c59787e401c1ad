"""Access to the pages: a one-time link gives a browser a cookie.

Links and cookies are signed with the server's secret and the settings' keys, so every process of a server accepts them,
and a new key in the settings ends them all. One that was made with a minted key names that key, and ends with it. A
link works once, for `LINK_S` seconds: the used ones are in a file that all processes of a server share. A cookie is
HttpOnly and SameSite=Strict. It may add notes if an admin's key or the server itself made its link. This also needs the
cookie's form token: pages of other ports of this machine send the cookie along, but cannot read the token.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from rolltap.errors import Forbidden
from rolltap.proxy.front.access import READ
from rolltap.proxy.sessions.keys import Keyring

LINK_S = 15 * 60
COOKIE_S = 7 * 86_400


class Access:
    """Creates and checks links and cookies. `clock` returns seconds since the epoch."""

    def __init__(self, secret: str, clock: Callable[[], float] = time.time, used_links: Path | None = None) -> None:
        """`used_links` is a file; without one, used links are known in this process only."""
        self._used_file = used_links
        self._secret = hashlib.sha256(f"viewer\0{secret}".encode()).digest()
        self._clock = clock
        self._used_links: dict[str, float] = {}
        self.cookie = f"rolltap_{hashlib.sha256(self._secret).hexdigest()[:8]}"
        """The cookie's name, different for each server: browsers share cookies between the ports of a machine."""

    def new_link(self, key_id: str = "") -> str:
        """Returns the token of a one-time link, made with the key `key_id` ("": by the server itself)."""
        return self._make_token("link", LINK_S, key_id)

    def redeem(self, token: str) -> str | None:
        """Returns a cookie for a link's token; None if the token is wrong, expired or used."""
        if not self._is_valid("link", token) or not self._use(self._signature("used", token)):
            return None
        return self._make_token("cookie", COOKIE_S, _key_id(token))

    def _use(self, link: str) -> bool:
        """Marks a link as used; False if it was."""
        if self._used_file is None:
            return self._mark(link, self._used_links)
        with open(self._used_file, "a+", opener=_open_private, encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            rows = (line.split() for line in file.read().splitlines())
            used = {row[0]: float(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
            is_new = self._mark(link, used)
            file.truncate(0)
            file.write("".join(f"{each} {until:.0f}\n" for each, until in used.items()))
        return is_new

    def _mark(self, link: str, used: dict[str, float]) -> bool:
        now = self._clock()
        for each in [each for each, until in used.items() if until <= now]:
            del used[each]
        if link in used:
            return False
        used[link] = now + LINK_S + 1
        return True

    def holder(self, cookie: str | None) -> str | None:
        """Returns the id of the key behind a cookie, "" for the server itself; None if it is invalid or expired."""
        return _key_id(cookie) if cookie is not None and self._is_valid("cookie", cookie) else None

    def form_token(self, cookie: str) -> str:
        """Returns the token that a page sends, besides its cookie, when it adds something."""
        return self._signature("form", cookie)

    def is_form(self, cookie: str, token: str) -> bool:
        """True if a page of this server that has the cookie made the request."""
        return hmac.compare_digest(token.encode(), self.form_token(cookie).encode())

    def _make_token(self, use: str, lifetime: float, key_id: str) -> str:
        body = f"{int(self._clock() + lifetime)}.{secrets.token_urlsafe(12)}.{key_id}"
        return f"{body}.{self._signature(use, body)}"

    def _is_valid(self, use: str, token: str) -> bool:
        body, _, signature = token.rpartition(".")
        expires = body.partition(".")[0]
        is_genuine = hmac.compare_digest(signature.encode(), self._signature(use, body).encode())
        return is_genuine and expires.isdecimal() and float(expires) > self._clock()

    def _signature(self, use: str, body: str) -> str:
        return hmac.new(self._secret, f"{use}\0{body}".encode(), hashlib.sha256).hexdigest()[:40]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _key_id(token: str) -> str:
    """Returns the id of the key in a valid token."""
    return token.split(".")[2]


class Viewers:
    """The keys that may see the pages and make links to them. Without a `keyring`, there is no plane and no key."""

    def __init__(self, keyring: Keyring | None = None) -> None:
        self._keyring = keyring

    async def key_id(self, key: str) -> str | None:
        """Returns the id of a key; None if it may not see the pages. Raises `Forbidden` for a key of another tenant."""
        caller = await self._keyring.caller(key) if self._keyring is not None else None
        if caller is not None and not caller.of_deployment:
            raise Forbidden(
                f"the pages show the default tenant's record, and the key is of tenant {caller.tenant!r}: read by "
                "`rolltap.open` or `GET /read/...`"
            )
        return caller.id if caller is not None and caller.role in READ else None

    async def go_on(self, key_id: str) -> bool:
        """True if the key still works; always for "", which stands for the server itself."""
        return not key_id or (self._keyring is not None and await self._keyring.works(key_id))

    async def may_note(self, key_id: str) -> bool:
        """True if links of the key may add notes: those of an admin and of the server itself."""
        return not key_id or (self._keyring is not None and await self._keyring.role(key_id) == "admin")
