"""Checks the tags that callers give to a new session: some of them control every call of the session."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

from rolltap.contract.admin import check_sizes
from rolltap.contract.control import TEMPERATURES
from rolltap.errors import InvalidRequest
from rolltap.proxy.sessions.capture import CAPTURED, PROJECT
from rolltap.proxy.sessions.roles import MAX_ROLES, NAME
from rolltap.proxy.sessions.roles import TAG as ROLES
from rolltap.tenants import TENANT_TAG
from rolltap.types import Session

TURNS = "turns"
"""Tag with the turn cap (`rolltap.proxy.call.turn_cap`)."""
TURN_COUNT = re.compile(r"[0-9]{1,10}")
TEMPERATURE = "rolltap.temperature"
"""Tag with the temperature at which the session's policy samples all of its calls (`rolltap.contract.control`)."""
TEMPERATURE_NUMBER = re.compile(r"[0-9]{1,3}(\.[0-9]{1,20})?")


def check_tags(tags: Mapping[str, str], policy: str, policies: Collection[str]) -> None:
    """Raises `InvalidRequest` for tags that a session of `policy` cannot have. `policies`: the served ones."""
    check_sizes(tags)
    for name in tags:
        if name in (CAPTURED, PROJECT, TENANT_TAG):
            raise InvalidRequest(f"tags.{name}: the server sets this tag itself", param=f"tags.{name}")
    if TURNS in tags and not TURN_COUNT.fullmatch(tags[TURNS]):
        raise InvalidRequest(f"tags.{TURNS}: a number of turns; 0: no cap", param=f"tags.{TURNS}")
    if TEMPERATURE in tags and not _is_temperature(tags[TEMPERATURE]):
        message = "tags.{}: a temperature of {} to {}".format(TEMPERATURE, *TEMPERATURES)
        raise InvalidRequest(message, param=f"tags.{TEMPERATURE}")
    if ROLES in tags:
        _check_roles(tags[ROLES], policy, policies)


def temperature_of(session: Session, policy: str) -> float | None:
    """The temperature that was set for calls of `policy` in the session; None: its settings or the harness decide."""
    set_value = session.tags.get(TEMPERATURE)
    return float(set_value) if set_value is not None and session.policy == policy else None


def _is_temperature(text: str) -> bool:
    least, most = TEMPERATURES
    return TEMPERATURE_NUMBER.fullmatch(text) is not None and least <= float(text) <= most


def _check_roles(text: str, policy: str, policies: Collection[str]) -> None:
    param = f"tags.{ROLES}"
    try:
        roles = json.loads(text)
    except (ValueError, RecursionError):
        roles = None
    if not isinstance(roles, dict) or not 1 <= len(roles) <= MAX_ROLES:
        raise InvalidRequest(f"{param}: a JSON object of 1 to {MAX_ROLES} roles, each with its policy", param=param)
    for role, role_policy in roles.items():
        if not NAME.fullmatch(role) or role_policy not in policies:
            message = f"{param}: role {role[:80]!r}: invalid role name, or unknown policy"
            raise InvalidRequest(message, param=param)
    if policy not in roles.values():
        raise InvalidRequest(f"{param}: no role has the session's policy {policy!r}", param=param)
