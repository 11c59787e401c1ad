"""Checks the settings before a plane listens on an address that other machines can reach."""

from __future__ import annotations

import logging
from typing import get_args

from rolltap.errors import ConfigError
from rolltap.extras import page
from rolltap.network import is_loopback
from rolltap.settings import PlaneName, Settings

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
