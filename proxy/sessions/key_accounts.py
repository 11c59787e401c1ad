"""What each project's minted key has used, over all its sessions and all proxies.

A call is counted in memory as it begins, its tokens as it ends; every `SAVE_S` seconds what is new is added to the
store, which answers what all proxies have counted. So a proxy that dies loses the count of about its last second, and
each proxy of several may let through, beyond a budget, what it admits within that time. Alone, a budget of calls is
exact. Tokens are known late: calls under way may go over their budget. The rate is each process's own.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from rolltap.contract.keys import Caller, KeyBudget, KeyUsage
from rolltap.counted import counted
from rolltap.errors import SessionClosed, StoreError
from rolltap.ledger.keys import Keys

log = logging.getLogger("rolltap.keys")

SAVE_S = 1.0
NOTHING = KeyUsage()
USED = "budget used"


@dataclass(slots=True, eq=False)
class KeyAccount:
    """One key's. `stored` is what all proxies had used when this one last saved, `unsaved` its own since."""

    budget: KeyBudget
    stored: KeyUsage
    unsaved: KeyUsage = NOTHING
    bucket_full_at: float = 0.0  # on the monotonic clock: when the calls of this minute are forgotten

    def count(self, *, calls: int = 0, tokens: int = 0, body_bytes: int = 0) -> None:
        self.unsaved += KeyUsage(calls, tokens, body_bytes)

    def used_up(self, calls: int = 1) -> str:
        """The budget that has no room for so many more calls, in words; empty if each has."""
        budget, used = self.budget, self.stored + self.unsaved
        if budget.calls is not None and used.calls + calls > budget.calls:
            return counted(budget.calls, "call")
        if budget.tokens is not None and used.tokens >= budget.tokens:
            return counted(budget.tokens, "token")
        if budget.mb is not None and used.body_bytes > budget.mb * 1_000_000:
            return f"{budget.mb:g} MB of requests"
        return ""

    def over_bytes(self, more_mb: float) -> bool:
        """Whether it has sent more than its budget of bytes and `more_mb` MB beyond."""
        mb, used = self.budget.mb, self.stored + self.unsaved
        return mb is not None and used.body_bytes > (mb + more_mb) * 1_000_000


class KeyAccounts:
    """The accounts of the keys that this process has seen."""

    def __init__(self, keys: Keys | None = None) -> None:
        """Without `keys` no key is minted."""
        self._keys = keys
        self._accounts: dict[str, KeyAccount] = {}
        self._storing = asyncio.Lock()

    async def open(self, caller: Caller) -> None:
        """Looks up what a project's key has used, the first time that it comes."""
        if caller.is_root or caller.id in self._accounts or self._keys is None:
            return
        async with self._storing:
            if caller.id not in self._accounts:
                stored = await self._keys.add_usage({caller.id: NOTHING})
                self._accounts[caller.id] = KeyAccount(caller.budget, stored[caller.id])

    def of(self, project: str) -> KeyAccount | None:
        """The account of a minted key; None for that of the settings, which is not counted."""
        return self._accounts.get(project)

    def check_opens(self, project: str) -> None:
        """`SessionClosed` where the project's key has used its budget, so that it opens no more sessions."""
        account = self._accounts.get(project)
        if account is not None and (used := account.used_up()):
            raise SessionClosed(f"{USED}: this key has {used}; ask for another key")

    async def save(self) -> None:
        """Adds what is new to the store. While the store is away it goes on counting."""
        if self._keys is None:
            return
        async with self._storing:
            unsaved = {id: account.unsaved for id, account in self._accounts.items() if account.unsaved != NOTHING}
            if not unsaved:
                return
            try:
                stored = await self._keys.add_usage(unsaved)
            except StoreError as error:
                log.warning("what %d keys have used is not saved yet: %s", len(unsaved), error.message)
                return
            for id, usage in unsaved.items():
                account = self._accounts[id]
                account.stored, account.unsaved = stored[id], account.unsaved - usage

    async def saving(self) -> None:
        """Saves now and then, for as long as it runs. A save under way ends also when this is cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await asyncio.shield(asyncio.ensure_future(self.save()))
