"""Keys on the admin plane: minted, listed, rotated, revoked, and the log of what each of them did."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from rolltap.contract.keys import KeyList, KeyWithSecret, MintKey, RevokedKeys, RotateKey
from rolltap.proxy.front.access import By
from rolltap.proxy.planes.answers import AuditPage, fields_of
from rolltap.proxy.planes.bodies import Limit
from rolltap.proxy.planes.policies import policy_of
from rolltap.proxy.planes.router import PlaneRouter
from rolltap.proxy.planes.services import Services
from rolltap.proxy.sessions.keys import Keyring
from rolltap.tenants import acting_for


def router(services: Services, keyring: Keyring) -> PlaneRouter:
    routes = PlaneRouter(tags=["keys"])
    keys = services.ledger.keys

    @routes.get("/keys")
    async def list_keys(by: By) -> KeyList:
        """Lists the minted keys, newest first, without their secrets. Keys in the settings are not included."""
        return KeyList(await keys.list(by))

    @routes.post("/keys")
    async def mint(body: MintKey, by: By) -> KeyWithSecret:
        """Mints a key. Only this answer contains its secret, `key`. It expires no later than the key that mints it.

        `tenant`: another tenant, which some policy in the settings must name. Needs an admin key of the default tenant.
        """
        if body.tenant is not None:
            by.check_grants(body.tenant)  # first: the other check names the tenants
            services.policies.check_tenant(body.tenant)
        with acting_for(body.tenant or by.tenant):
            for policy in body.policies or ():
                policy_of(services, policy)
        minted = await keys.mint(body, by)
        await keyring.changed()
        return KeyWithSecret(**fields_of(minted.record), key=minted.key)

    @routes.post("/keys/{key_id}/rotate")
    async def rotate(key_id: str, body: RotateKey, by: By) -> KeyWithSecret:
        """Gives the key a new secret. The previous ones stay valid for `overlap` more seconds."""
        minted = await keys.rotate(key_id, body, by)
        await keyring.changed()
        return KeyWithSecret(**fields_of(minted.record), key=minted.key)

    @routes.post("/keys/{key_id}/revoke")
    async def revoke(key_id: str, by: By) -> RevokedKeys:
        """Revokes the key and every key minted with it: at once here, within a second at other proxies."""
        revoked = await keys.revoke(key_id, by)
        await keyring.changed()
        return RevokedKeys(revoked)

    return routes


def audit_router(services: Services) -> PlaneRouter:
    routes = PlaneRouter(tags=["keys"])

    @routes.get("/audit")
    async def read_audit(
        key_id: str | None = None, before: Annotated[int | None, Query(ge=1, lt=2**63)] = None, limit: Limit = 100
    ) -> AuditPage:
        """Lists entries, newest first, optionally of one key. `before` is the last `seq` of the previous page."""
        page = await services.ledger.audit.newest(key_id=key_id, before=before, limit=min(limit, 1000))
        return AuditPage(page)

    return routes
