"""What the settings must say before a plane listens where others reach it."""

from __future__ import annotations

import logging
from typing import get_args

from rolltap.addresses import is_loopback
from rolltap.errors import ConfigError
from rolltap.settings import PlaneName, Settings

log = logging.getLogger("rolltap.front")

MIN_KEY = 16
MIN_KINDS = 8
"""Characters, and different ones, of a key that nobody guesses. Those that rolltap makes have 43 and more."""


def check_exposure(settings: Settings) -> None:
    """Loopback needs nothing; any other address only with keys that somebody chose. Warns of keys that go in clear."""
    listen, keys = settings.listen, settings.keys
    exposed = {plane: host for plane in get_args(PlaneName) if not is_loopback(host := listen.host_of(plane))}
    if not exposed:
        return
    host = next(iter(exposed.values()))
    if not (keys.admin and keys.trainer):
        raise ConfigError(f"listening on {host} needs keys: set keys.admin and keys.trainer in the settings")
    chosen = {name: key for name, key in keys.model_dump().items() if key}
    for name, key in chosen.items():
        if len(key) < MIN_KEY or len(set(key)) < MIN_KINDS:
            raise ConfigError(
                f"keys.{name} is weak: on {host} a key needs {MIN_KEY} characters or more, e.g. those of "
                "`openssl rand -base64 32`"
            )
    if len(set(chosen.values())) < len(chosen):
        raise ConfigError("two of [keys] are the same: give each role a key of its own")
    if not listen.tls_certificate:
        planes = " and ".join(exposed)
        log.warning(
            "keys and prompts go in clear to the %s plane on %s: set listen.tls_certificate, or put a proxy with TLS "
            "in front (docs/security.md)",
            planes,
            host,
        )
