"""Minted keys: their roles, policies, budgets and expiry; and the audit log.

A key is a record with one or more secrets; the store has only the secrets' hashes. Rotation adds a secret and sets an
expiry on the previous ones, so the key's id (in claims, rewards and the audit log) stays. No key grants more than it
has: only admin keys mint, and a minted key expires no later than its minter. Revoking a key also revokes all keys that
were minted with it.

A project key may have a budget, which is set once: rotation changes neither the budget nor the usage. Project keys
cannot mint, so they cannot grant a larger budget.

A key belongs to the tenant of its minter. The deployment's admin keys also mint, list, rotate and revoke keys of other
tenants.

The audit log is append-only. An entry with the id of the key is written before a change of sessions, policies, tasks
and keys. Rewards, claims and attempts have the key's id in their own rows.
"""

from __future__ import annotations

import getpass
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

from rolltap.calllog.backend import database_clock
from rolltap.calllog.schema import every_row, rows_of
from rolltap.contract.keys import (
    MINTED,
    AuditEntry,
    Caller,
    KeyBudget,
    KeyRecord,
    KeyUsage,
    MintedKey,
    MintKey,
    RotateKey,
    key_hash,
)
from rolltap.errors import Forbidden, InvalidRequest, LedgerError, NotFound
from rolltap.ids import new_id
from rolltap.ledger.schema import audit, key_secrets, keys
from rolltap.ledger.unit_of_work import Tx, UnitOfWork
from rolltap.tenants import EVERY_TENANT, acting_for

SECRET_BYTES = 32


class Keys:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def mint(self, body: MintKey, by: Caller) -> MintedKey:
        """Mints a key. Only this answer contains its secret."""

        def work(tx: Tx) -> MintedKey:
            _check_may_grant(tx, by)
            id, tenant = new_id(), body.tenant or by.tenant
            by.check_grants(tenant)
            values = {
                "id": id,
                "name": body.name,
                "role": body.role,
                "policies": None if body.policies is None else sorted(set(body.policies)),
                "minted_by": by.id,
                "tenant": tenant,
                "budget": None if body.budget is None else msgspec.structs.asdict(body.budget),
                "created_at": tx.now,
                "expires_at": _end(tx, by.expires_at if body.ttl is None else tx.now + body.ttl, by),
            }
            tx.note("key_minted", id, name=body.name, role=body.role, by=by.id)
            with rows_of(tx.connection, tenant):
                tx.run(keys.insert().values(values))
                return MintedKey(_record(tx, id), _add_secret(tx, id, body.role))

        return await self._uow.transact(work)

    async def rotate(self, key_id: str, body: RotateKey, by: Caller) -> MintedKey:
        """Adds a secret to the key. The previous ones expire after `body.overlap` seconds."""

        def work(tx: Tx) -> MintedKey:
            _check_may_grant(tx, by)
            with _reach(tx, by):
                row = _locked(tx, key_id)
                _check_descends(tx, row, by)
            if row.revoked_at is not None or (row.expires_at is not None and row.expires_at <= tx.now):
                raise LedgerError(f"key {key_id} has expired or was revoked; mint a new one")
            end = _end(tx, row.expires_at if body.ttl is None else tx.now + body.ttl, by)
            last = tx.now + body.overlap
            longer = sa.or_(key_secrets.c.expires_at.is_(None), key_secrets.c.expires_at > last)
            tx.note("key_rotated", key_id, overlap=body.overlap, by=by.id)
            with rows_of(tx.connection, row.tenant):
                tx.run(sa.update(keys).where(keys.c.id == key_id).values(expires_at=end))
                tx.run(sa.update(key_secrets).where(key_secrets.c.key_id == key_id, longer).values(expires_at=last))
                key = _add_secret(tx, key_id, row.role)
                return MintedKey(_record(tx, key_id), key)

        return await self._uow.transact(work)

    async def revoke(self, key_id: str, by: Caller) -> Sequence[str]:
        """Revokes the key and all keys minted with it; returns the ids of those that were not revoked before."""

        def work(tx: Tx) -> Sequence[str]:
            with _reach(tx, by):
                ids = _revoke(tx, key_id)
            for id in ids:
                tx.note("key_revoked", id, by=by.id)
            return ids

        return await self._uow.transact(work)

    async def list(self, by: Caller) -> Sequence[KeyRecord]:
        """All minted keys that `by` may revoke, including expired ones, the newest first."""

        def work(tx: Tx) -> Sequence[KeyRecord]:
            with _reach(tx, by):
                return _records(tx, sa.select(keys).order_by(keys.c.id.desc()))

        return await self._uow.query(work)

    async def add_usage(self, usages: Mapping[str, KeyUsage]) -> dict[str, KeyUsage]:
        """Adds new usage to the keys of any tenant; returns each key's total usage over all proxies."""

        def work(tx: Tx) -> dict[str, KeyUsage]:
            for id in sorted(usages):  # proxies and `revoke` lock in this order, so there are no deadlocks
                more = usages[id]
                values = {
                    "used_calls": keys.c.used_calls + more.calls,
                    "used_tokens": keys.c.used_tokens + more.tokens,
                    "used_bytes": keys.c.used_bytes + more.body_bytes,
                }
                tx.run(sa.update(keys).where(keys.c.id == id).values(values))
            return {row.id: _usage(row) for row in tx.all(sa.select(keys).where(keys.c.id.in_(usages)))}

        with acting_for(EVERY_TENANT):
            return await self._uow.transact(work)

    async def working(self) -> dict[str, tuple[Caller, float | None]]:
        """The valid keys of all tenants: secret hash to caller and remaining seconds (None: no expiry)."""
        with acting_for(EVERY_TENANT):
            return await self._uow.query(_working)


def _reach(tx: Tx, by: Caller) -> AbstractContextManager[None]:
    """A context in which `tx` sees the keys that `by` may list, rotate and revoke."""
    return every_row(tx.connection) if by.of_deployment else nullcontext()


def _revoke(tx: Tx, key_id: str) -> list[str]:
    """Revokes the key and its descendants; returns the ids of those that were not revoked before."""
    _locked(tx, key_id)
    ended, level = [], [key_id]
    while level:
        ended += level
        minted = sa.select(keys.c.id).where(keys.c.minted_by.in_(level), keys.c.id.not_in(ended))
        level = [row.id for row in tx.all(minted.order_by(keys.c.id))]
    live = sa.and_(keys.c.id.in_(ended), keys.c.revoked_at.is_(None))
    ids = [row.id for row in tx.all(sa.select(keys.c.id).where(live).order_by(keys.c.id).with_for_update())]
    tx.run(sa.update(keys).where(keys.c.id.in_(ids)).values(revoked_at=tx.now))
    return ids


def _check_may_grant(tx: Tx, by: Caller) -> None:
    """Raises `Forbidden` unless `by` is a valid admin key. Locks it against revocation until the transaction's end."""
    if by.role != "admin":
        raise Forbidden("only admin keys can mint and rotate keys")
    row = tx.first(sa.select(keys).where(keys.c.id == by.id).with_for_update())
    if row is not None and row.revoked_at is not None:
        raise Forbidden("this key was revoked")


def _check_descends(tx: Tx, row: Any, by: Caller) -> None:
    """Raises `Forbidden` if a minted key rotates a key other than itself and its descendants."""
    if tx.first(sa.select(keys.c.id).where(keys.c.id == by.id)) is None:
        return
    while row is not None and row.id != by.id:
        row = tx.first(sa.select(keys).where(keys.c.id == row.minted_by))
    if row is None:
        raise Forbidden("a minted key can rotate only itself and keys that were minted with it")


def _end(tx: Tx, end: float | None, by: Caller) -> float | None:
    """Returns `end`. Raises `InvalidRequest` if it is later than the expiry of `by`."""
    if by.expires_at is not None and (end is None or end > by.expires_at):
        remaining_s = max(0.0, by.expires_at - tx.now)
        raise InvalidRequest(f"ttl: the minting key itself expires in {remaining_s:.0f} seconds", param="ttl")
    return end


def _add_secret(tx: Tx, key_id: str, role: str) -> str:
    key = f"{MINTED}{role}.{secrets.token_urlsafe(SECRET_BYTES)}"
    tx.run(key_secrets.insert().values(hash=key_hash(key), key_id=key_id))
    return key


def _locked(tx: Tx, key_id: str) -> Any:
    row = tx.first(sa.select(keys).where(keys.c.id == key_id).with_for_update())
    if row is None:
        raise NotFound(f"no key {key_id!r}", param="key_id")
    return row


def _record(tx: Tx, key_id: str) -> KeyRecord:
    return _records(tx, sa.select(keys).where(keys.c.id == key_id))[0]


def _records(tx: Tx, statement: sa.Select[Any]) -> list[KeyRecord]:
    works = sa.or_(key_secrets.c.expires_at.is_(None), key_secrets.c.expires_at > tx.now)
    count = sa.func.count().label("working")
    counts = sa.select(key_secrets.c.key_id, count).where(works).group_by(key_secrets.c.key_id)
    secrets_of = {row.key_id: row.working for row in tx.all(counts)}
    return [
        KeyRecord(
            id=row.id,
            name=row.name,
            role=row.role,
            policies=None if row.policies is None else tuple(row.policies),
            minted_by=row.minted_by,
            created_at=row.created_at,
            expires_at=row.expires_at,
            revoked_at=row.revoked_at,
            tenant=row.tenant,
            budget=KeyBudget(**(row.budget or {})),
            used=_usage(row),
            secrets=secrets_of.get(row.id, 0),
        )
        for row in tx.all(statement)
    ]


def _usage(row: Any) -> KeyUsage:
    return KeyUsage(row.used_calls, row.used_tokens, row.used_bytes)


def _working(tx: Tx) -> dict[str, tuple[Caller, float | None]]:
    def not_expired(column: sa.Column[Any]) -> sa.ColumnElement[bool]:
        return sa.or_(column.is_(None), column > tx.now)

    statement = (
        sa.select(keys, key_secrets.c.hash, key_secrets.c.expires_at.label("secret_expires_at"))
        .join(key_secrets, key_secrets.c.key_id == keys.c.id)
        .where(keys.c.revoked_at.is_(None), not_expired(keys.c.expires_at), not_expired(key_secrets.c.expires_at))
    )
    callers: dict[str, tuple[Caller, float | None]] = {}
    for row in tx.all(statement):
        policies = None if row.policies is None else frozenset(row.policies)
        ends = [end for end in (row.expires_at, row.secret_expires_at) if end is not None]
        remaining_s = min(ends) - tx.now if ends else None
        budget = KeyBudget(**(row.budget or {}))
        callers[row.hash] = (Caller(row.id, row.role, policies, row.expires_at, row.tenant, budget), remaining_s)
    return callers


class Audit:
    def __init__(self, uow: UnitOfWork) -> None:
        self._uow = uow

    async def append(self, key_id: str, role: str, action: str, detail: Mapping[str, Any]) -> None:
        await self._uow.transact(lambda tx: append(tx.connection, tx.now, key_id, role, action, detail))

    async def newest(self, *, key_id: str | None = None, before: int | None = None, limit: int) -> Sequence[AuditEntry]:
        """A page of entries, the newest first, of one key if given. `before`: the last `seq` of the previous page."""
        statement = sa.select(audit).order_by(audit.c.seq.desc()).limit(limit)
        if key_id is not None:
            statement = statement.where(audit.c.key_id == key_id)
        if before is not None:
            statement = statement.where(audit.c.seq < before)
        rows = await self._uow.query(lambda tx: tx.all(statement))
        return [AuditEntry(row.seq, row.at, row.key_id, row.role, row.action, row.detail) for row in rows]


def append(
    connection: sa.Connection, at: float, key_id: str, role: str, action: str, detail: Mapping[str, Any]
) -> None:
    """Appends an entry in the current transaction."""
    values = {"at": at, "key_id": key_id, "role": role, "action": action, "detail": dict(detail)}
    connection.execute(audit.insert().values(values))


def note_prune(
    connection: sa.Connection, older_than: str, exported: Sequence[Path], ledger_older_than: str = ""
) -> None:
    """Records in the audit log that this machine's user is about to prune."""
    detail: dict[str, Any] = {"older_than": older_than, "exported": [str(path) for path in exported]}
    if ledger_older_than:
        detail["ledger_older_than"] = ledger_older_than
    append(connection, database_clock(connection), f"user {_user()}", "local", "log prune", detail)


def _user() -> str:
    """The name of this process's user; its number if it has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # KeyError before Python 3.13
        return str(os.getuid())
