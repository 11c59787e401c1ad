"""Who makes a request of any plane, by its key. (Sessions' keys: `rolltap.proxy.sessions.session_cache`.)

The settings hold one key of each role; admin keys mint others, of which the store has the hashes. This process keeps
the minted keys that work in memory and reads them again after `TRUST_S` seconds, so a key that another proxy minted,
rotated or revoked is known here that soon, and what this one did is known at once. A proxy that is alone on its store
reads them once. While the store is away the known keys go on working: nobody can revoke one then.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import time

from rolltap.contract.keys import MINTED, ROLES, Caller, Role, key_hash
from rolltap.errors import StoreUnavailable
from rolltap.ledger.keys import Keys
from rolltap.proxy.sessions.key_accounts import KeyAccounts
from rolltap.proxy.sessions.session_cache import ANSWERS_WITHIN_S, TRUST_S
from rolltap.settings import KeySettings

AGAIN_S = 0.1
"""An unknown key has the store asked again, but not sooner than so many seconds after the last time."""

Working = dict[str, tuple[Caller, float]]
"""By the hash of a secret: whose it is, and until when on the monotonic clock."""


class Keyring:
    """The keys of the settings and the minted ones. `alone`: no other process mints or revokes keys.

    `accounts` has what the minted projects' keys have used.
    """

    def __init__(self, settings: KeySettings, minted: Keys | None = None, *, alone: bool = False) -> None:
        self._roots = [(Caller(role, role), getattr(settings, role).encode()) for role in ROLES]
        self._minted = minted
        self.accounts = KeyAccounts(minted)
        self._alone = alone
        self._working: Working = {}
        self._asked_at = self._trusted_until = -math.inf
        self._reading = asyncio.Lock()

    def root(self, key: str) -> Caller | None:
        """The holder of a key of the settings; every one is compared, so the time taken tells nothing."""
        match: Caller | None = None
        for caller, known in self._roots:
            if known and hmac.compare_digest(known, key.encode()):
                match = caller
        return match

    async def caller(self, key: str) -> Caller | None:
        """Who holds `key`; None if it is not known, or not any more."""
        if (root := self.root(key)) is not None:
            return root
        return await self._minted_caller(key_hash(key)) if key.startswith(MINTED) else None

    async def works(self, key_id: str) -> bool:
        """Whether the key of this id goes on."""
        if key_id in ROLES:
            return any(known and caller.id == key_id for caller, known in self._roots)
        now = time.monotonic()
        if now >= self._trusted_until or (not self._has(key_id) and now >= self._asked_at + AGAIN_S):
            await self._read(now)
        return self._has(key_id)

    async def role(self, key_id: str) -> Role | None:
        """The role of the key of this id; None if it does not go on."""
        if not await self.works(key_id):
            return None
        callers = [*(caller for caller, _ in self._roots), *(caller for caller, _ in self._working.values())]
        return next((caller.role for caller in callers if caller.id == key_id), None)

    async def project(self, key: str | None) -> Caller | None:
        """The project whose key it is, if it is one's; its account is open then."""
        caller = await self.caller(key) if key else None
        if caller is None or caller.role != "project":
            return None
        await self.accounts.open(caller)
        return caller

    async def changed(self) -> None:
        """The minted keys were changed through this process: they are read again."""
        self._asked_at = self._trusted_until = -math.inf
        await self._read(time.monotonic())

    async def _minted_caller(self, hashed: str) -> Caller | None:
        now = time.monotonic()
        if now >= self._trusted_until or (hashed not in self._working and now >= self._asked_at + AGAIN_S):
            await self._read(now)
        caller, ends_at = self._working.get(hashed, (None, 0.0))
        return caller if time.monotonic() < ends_at else None

    def _has(self, key_id: str) -> bool:
        now = time.monotonic()
        return any(caller.id == key_id and now < ends_at for caller, ends_at in self._working.values())

    async def _read(self, since: float) -> None:
        if self._minted is None:
            return
        async with self._reading:
            if self._asked_at > since:
                return  # another request has read them meanwhile
            self._asked_at = asked_at = time.monotonic()
            try:
                async with asyncio.timeout(ANSWERS_WITHIN_S if self._working else None):
                    working = await self._minted.working()
            except (StoreUnavailable, TimeoutError):
                if not self._working:
                    raise
                self._trusted_until = asked_at + TRUST_S
                return
            if self._asked_at != asked_at:
                return  # they were changed meanwhile: what was read may be older
            self._working = {
                hashed: (caller, math.inf if left is None else asked_at + left)
                for hashed, (caller, left) in working.items()
            }
            self._trusted_until = math.inf if self._alone else asked_at + TRUST_S
