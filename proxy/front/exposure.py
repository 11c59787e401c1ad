"""Who can reach a plane: checks of the settings before it listens, and of the host that a request names.

On loopback, programs of this machine may call a plane, and web pages in its browser may not. A page can reach loopback
directly, which shows in `Origin`, or under a name that it made resolve to 127.0.0.1 (DNS rebinding), which shows in
`Host`. Both are refused. If you run a reverse proxy, list the hosts that it forwards in `listen.names`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import get_args
from urllib.parse import urlsplit

from rolltap.errors import ConfigError
from rolltap.extras import page
from rolltap.network import is_loopback
from rolltap.settings import ListenSettings, PlaneName, Settings

log = logging.getLogger("rolltap.front")

MIN_KEY = 16
MIN_KINDS = 8
"""Minimum characters, and minimum different characters, of a key. rolltap's own keys have 43 characters or more."""


def check_exposure(settings: Settings) -> None:
    """Raises `ConfigError` for missing or weak keys away from loopback. Warns if TLS is missing."""
    listen, keys = settings.listen, settings.keys
    exposed = {plane: host for plane in get_args(PlaneName) if not is_loopback(host := listen.host_of(plane))}
    if not exposed:
        return
    host = next(iter(exposed.values()))
    if not (keys.admin and keys.trainer):
        raise ConfigError(f"listening on {host} needs keys: set keys.admin and keys.trainer in the settings")
    set_keys = {name: key for name, key in keys.model_dump().items() if key}
    for name, key in set_keys.items():
        if len(key) < MIN_KEY or len(set(key)) < MIN_KINDS:
            raise ConfigError(
                f"keys.{name} is weak: on {host} a key needs {MIN_KEY} characters or more, e.g. those of "
                "`openssl rand -base64 32`"
            )
    if len(set(set_keys.values())) < len(set_keys):
        raise ConfigError("two of the [keys] are equal: give each role its own key")
    if not listen.tls_certificate:
        planes = " and ".join(exposed)
        log.warning(
            "keys and prompts are sent unencrypted to the %s plane on %s: set listen.tls_certificate, or put a TLS "
            "proxy in front (%s)",
            planes,
            host,
            page("security"),
        )


CONTAINER_NAMES = ("host.docker.internal", "host.containers.internal")
"""Names that containers use for their host machine."""

Headers = Sequence[tuple[bytes, bytes]]


class Hosts:
    """The names under which a plane on loopback may be called."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(name.lower() for name in (*names, *CONTAINER_NAMES))
        self._seen: set[bytes] = set()  # values of Host that are allowed: few, and looked up in every request

    @classmethod
    def of(cls, listen: ListenSettings, host: str) -> Hosts | None:
        """The check for a plane on `host`; None if `host` is not loopback, as other machines may call it then."""
        if not is_loopback(host):
            return None
        return cls((*listen.names, urlsplit(listen.public_url).hostname or ""))

    def refusal(self, headers: Headers) -> str:
        """The reason to refuse a request with these headers; empty if it is allowed."""
        host, origin, count = b"", None, 0
        for name, value in headers:
            if name == b"host":
                host, count = value, count + 1
            elif name == b"origin":
                origin = value
        if count != 1:
            return "send one Host header"
        if host not in self._seen and not self._learn(host):
            return f"the host name {host[:80].decode('latin-1')!r} is not allowed; add it to listen.names"
        if origin is not None and origin.lower() not in (b"http://" + host.lower(), b"https://" + host.lower()):
            return f"a web page of {origin[:80].decode('latin-1')!r} may not call this plane"
        return ""

    def _learn(self, host: bytes) -> bool:
        try:
            name = urlsplit(f"//{host.decode('ascii')}").hostname or ""
        except ValueError:
            return False
        allowed = name.lower() in self._names or is_loopback(name)
        if allowed and len(self._seen) < 64:
            self._seen.add(host)
        return allowed
