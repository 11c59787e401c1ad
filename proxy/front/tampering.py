"""Counts requests that attack the proxy with a valid session key, on the session of the key.

Requests with an unknown key are not counted. Counting does not change the answer, even while the store is unavailable.
A process counts at most `MOST_COUNTED` requests of each kind per session, so that a flood stays cheap.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from cachetools import LRUCache

from rolltap.calllog.facts import CallLog
from rolltap.contract.keys import MINTED, key_hash
from rolltap.errors import StoreError
from rolltap.tampering import TamperingAct, TamperingKind
from rolltap.tenants import acting_for, tenant_of

log = logging.getLogger("rolltap.tampering")

SESSIONS = 4096
"""Number of sessions with counts in memory. The least recently used are dropped and start again at 0."""
MOST_COUNTED = 100
AT_ONCE = 4
SESSION_KEY = re.compile(r"rt-[\w-]{43}")
ENCODED = re.compile(rb"%(25)?(2e|5c|23|3f|00)|/\.\.?(/|$)", re.IGNORECASE)
"""Dots, backslash, `#`, `?` and NUL, encoded once or twice; dot segments. An encoded slash is no attack: clients encode
the slash in a model's name."""
OTHER_PLANES = re.compile(
    r"/(leases|trainers|dead-letters|sessions|tasks|groups|rollouts|rewards|nodes|audit|keys|read)(/|$)"
)

CountTampering = Callable[[str, TamperingKind, str], Awaitable[None]]
"""Counts an act of tampering: session key, kind, detail."""


async def uncounted_acts(key: str, kind: TamperingKind, detail: str) -> None:
    """Counts nothing."""


class TamperingCounter:
    """Finds the session of a key and appends acts of tampering to it."""

    def __init__(self, call_log: CallLog, append: Callable[[str, TamperingAct], Awaitable[None]]) -> None:
        self._log = call_log
        self._append = append
        self._noted: LRUCache[str, Counter[TamperingKind]] = LRUCache(SESSIONS)
        self._under_way = 0

    async def note(self, key: str, kind: TamperingKind, detail: str) -> None:
        if key.startswith(MINTED) or not SESSION_KEY.fullmatch(key) or self._under_way >= AT_ONCE:
            return
        hashed = key_hash(key)
        if self._noted.get(hashed, Counter())[kind] >= MOST_COUNTED:
            return
        self._under_way += 1
        try:
            session = await self._log.session_by_key(hashed)
            if session is None or session.closed_at is not None:
                return
            self._count(hashed, kind)
            with acting_for(tenant_of(session.tags)):
                await self._append(session.id, TamperingAct.at(kind, detail))
        except StoreError as error:
            log.warning("an act of tampering (%s) could not be counted: %s", kind.value, error.message)
        finally:
            self._under_way -= 1

    def _count(self, hashed: str, kind: TamperingKind) -> None:
        self._noted.setdefault(hashed, Counter())[kind] += 1


def presented_key(headers: Any) -> str:
    """The request's key in any header that a dialect uses; empty if it has none."""
    for name, value in headers:
        if name == b"authorization":
            return value.decode("latin-1").partition(" ")[2].strip()
        if name in (b"x-api-key", b"x-goog-api-key"):
            return value.decode("latin-1").strip()
    return ""


def suspicion(scope: Any) -> TamperingKind | None:
    """The kind of tampering that a request's path shows, if any."""
    if ENCODED.search(scope.get("raw_path") or b""):
        return TamperingKind.PATH
    path = re.sub(r"^/s/[^/]+", "", re.sub("//+", "/", scope["path"]))
    return TamperingKind.OTHER_PLANE if OTHER_PLANES.match(path) else None
