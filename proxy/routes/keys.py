"""Keys on the admin plane: minted, listed, rotated, revoked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from rolltap.contract.keys import MintKey, RotateKey
from rolltap.proxy.access import By
from rolltap.proxy.routes.policies import policy_of
from rolltap.proxy.routes.services import Services
from rolltap.proxy.sessions.keys import Keyring


def router(services: Services, keyring: Keyring) -> APIRouter:
    routes = APIRouter(tags=["keys"])
    keys = services.ledger.keys

    @routes.get("/keys")
    async def list_keys() -> dict[str, Any]:
        """The minted keys, the newest first, without their secrets. Those of the settings are not among them."""
        return {"keys": [asdict(record) for record in await keys.list()]}

    @routes.post("/keys")
    async def mint(body: MintKey, by: By) -> dict[str, Any]:
        """A new key. `key` is in this answer and nowhere else; it ends no later than the one that mints it."""
        for policy in body.policies or ():
            policy_of(services, policy)
        minted = await keys.mint(body, by)
        await keyring.changed()
        return {**asdict(minted.record), "key": minted.key}

    @routes.post("/keys/{key_id}/rotate")
    async def rotate(key_id: str, body: RotateKey, by: By) -> dict[str, Any]:
        """Another secret for the key; the former ones work for `overlap` seconds more."""
        minted = await keys.rotate(key_id, body, by)
        await keyring.changed()
        return {**asdict(minted.record), "key": minted.key}

    @routes.post("/keys/{key_id}/revoke")
    async def revoke(key_id: str, by: By) -> dict[str, Any]:
        """Ends the key, and every key that was minted with it, at once here and within a second at other proxies."""
        revoked = await keys.revoke(key_id, by)
        await keyring.changed()
        return {"revoked": list(revoked)}

    return routes
