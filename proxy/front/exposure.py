"""What the settings must say before a plane listens where others reach it."""

from __future__ import annotations

import logging
from typing import get_args

from rolltap.errors import ConfigError
from rolltap.proxy.front.hosts import is_loopback
from rolltap.settings import PlaneName, Settings

log = logging.getLogger("rolltap.front")

MIN_KEY = 16
"""Characters of a key that nobody guesses. Those that rolltap makes have 43 and more."""


def check_exposure(settings: Settings) -> None:
    """Loopback needs nothing; any other address only with keys that somebody chose. Warns of keys that go in clear."""
    listen, keys = settings.listen, settings.keys
    exposed = {plane: host for plane in get_args(PlaneName) if not is_loopback(host := listen.host_of(plane))}
    if not exposed:
        return
    host = next(iter(exposed.values()))
    if not (keys.admin and keys.trainer):
        raise ConfigError(f"listening on {host} needs keys: set keys.admin and keys.trainer in the settings")
    for name in ("admin", "trainer", "evaluator", "project"):
        if (key := getattr(keys, name)) and len(key) < MIN_KEY:
            raise ConfigError(f"keys.{name} has {len(key)} characters: on {host} a key needs {MIN_KEY} or more")
    if not listen.tls_certificate:
        planes = " and ".join(exposed)
        log.warning(
            "keys and prompts go in clear to the %s plane on %s: set listen.tls_certificate, or put a proxy with TLS "
            "in front (docs/security.md)",
            planes,
            host,
        )
