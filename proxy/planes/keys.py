"""Keys on the admin plane: minted, listed, rotated, revoked, and the log of what each of them did."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.contract.keys import AuditPage, KeyList, KeyWithSecret, MintedKey, MintKey, RevokedKeys, RotateKey
from rolltap.contract.planes import KeyPlane
from rolltap.proxy.planes.policies import policy_of
from rolltap.proxy.planes.services import Routes, fields_of
from rolltap.proxy.sessions.keys import Keyring
from rolltap.tenants import acting_for


@dataclass(frozen=True)
class KeyRoutes(Routes, KeyPlane):
    keyring: Keyring

    async def list_keys(self) -> KeyList:
        return KeyList(await self.services.ledger.keys.list(self.by))

    async def mint_key(self, body: MintKey) -> KeyWithSecret:
        if body.tenant is not None:
            self.by.check_grants(body.tenant)  # first: the other check names the tenants
            self.services.policies.check_tenant(body.tenant)
        with acting_for(body.tenant or self.by.tenant):
            for policy in body.policies or ():
                policy_of(self.services, policy)
        return await self._shown(await self.services.ledger.keys.mint(body, self.by))

    async def rotate_key(self, key_id: str, body: RotateKey) -> KeyWithSecret:
        return await self._shown(await self.services.ledger.keys.rotate(key_id, body, self.by))

    async def revoke_key(self, key_id: str) -> RevokedKeys:
        revoked = await self.services.ledger.keys.revoke(key_id, self.by)
        await self.keyring.changed()
        return RevokedKeys(revoked)

    async def audit(self, key_id: str | None = None, before: int | None = None, limit: int = 100) -> AuditPage:
        page = await self.services.ledger.audit.newest(key_id=key_id, before=before, limit=min(limit, 1000))
        return AuditPage(page)

    async def _shown(self, minted: MintedKey) -> KeyWithSecret:
        await self.keyring.changed()
        return KeyWithSecret(**fields_of(minted.record), key=minted.key)
