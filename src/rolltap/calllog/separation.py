"""Row-level security: keeps tenants apart on Postgres in every statement.

A transaction acts for the tenant in the setting `rolltap.tenant` (`rolltap.calllog.postgres` sets it). The tenant of a
session and of its calls is in the session's tags. Every table of the ledger has a column `tenant`, whose default is the
setting. It is part of primary and foreign keys, so two tenants may use the same names, and no row refers to another
tenant's. rolltap's statements do not name the column, except in keys. Tenants share request parts by hash; they are
read as `EVERY_TENANT` for calls that the tenant may see (`every_row`).

This protects against statements without a tenant condition. It does not protect against somebody who runs SQL as the
proxy's role, who can set `rolltap.tenant`. Superusers and roles with BYPASSRLS are not restricted (`check_separation`).
On SQLite there is only one tenant, and this module does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from rolltap.calllog.schema import metadata
from rolltap.errors import ConfigError
from rolltap.tenants import DEFAULT_TENANT, EVERY_TENANT, NOBODY, TENANT_NAME, TENANT_TAG, current_tenant

SETTING = "current_setting('rolltap.tenant', true)"
OWN = f"tenant = {SETTING}"

BY_REFERENCE = {
    "call_intents": "EXISTS (SELECT FROM sessions s WHERE s.id = session_id)",
    "call_completions": "EXISTS (SELECT FROM call_intents i WHERE i.id = call_id)",
    "deliveries": "EXISTS (SELECT FROM call_intents i WHERE i.id = call_id)",
    "prunings": "EXISTS (SELECT FROM sessions s WHERE s.id = session_id)",
    "notes": "EXISTS (SELECT FROM sessions s WHERE s.id = session_id)",
    "annotations": "EXISTS (SELECT FROM sessions s WHERE s.id = session_id)",
}
"""Tables whose rows are visible if the row that they refer to is visible; that row's table has a policy itself."""
NO_TENANT = {"processes"}
"""Tables without user data."""
SHARED = {"parts"}


def set_tenant(connection: sa.Connection, tenant: str) -> None:
    """Sets the tenant for the rest of the transaction."""
    if tenant not in (EVERY_TENANT, NOBODY) and not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(f"{tenant[:80]!r} is not a valid tenant name; see ROLLTAP_TENANT")
    connection.exec_driver_sql(f"SET LOCAL rolltap.tenant = '{tenant}'")


@contextmanager
def rows_of(connection: sa.Connection, tenant: str) -> Iterator[None]:
    """Runs the block's statements as `tenant` instead of the task's tenant."""
    former = current_tenant()
    if connection.dialect.name != "postgresql" or tenant == former:
        yield
        return
    set_tenant(connection, tenant)
    yield
    set_tenant(connection, former)


def every_row(connection: sa.Connection) -> AbstractContextManager[None]:
    """Runs the block's statements on the rows of all tenants."""
    return rows_of(connection, EVERY_TENANT)


def check_separation(connection: sa.Connection) -> None:
    """Raises `ConfigError` unless this database can keep several tenants apart."""
    if connection.dialect.name != "postgresql":
        raise ConfigError("tenants need a Postgres store; on SQLite, remove policies.NAME.tenant from the settings")
    passes = "SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
    if connection.exec_driver_sql(passes).scalar_one():
        raise ConfigError(
            "tenants: the store's user is a superuser or has BYPASSRLS, so row-level security does not apply to it; "
            "connect as a role without either (CREATE ROLE rolltap LOGIN) that owns the database"
        )


def tenants_on_record(connection: sa.Connection) -> list[str]:
    """The tenants that ever had a policy, and the default tenant."""
    if connection.dialect.name != "postgresql" or not sa.inspect(connection).has_table("policies"):
        return [DEFAULT_TENANT]
    with every_row(connection):
        rows = connection.exec_driver_sql("SELECT DISTINCT tenant FROM policies")
        return sorted({DEFAULT_TENANT, *(row.tenant for row in rows)})


def separate(connection: sa.Connection, tables: Sequence[sa.Table]) -> None:
    """Enables row-level security on existing tables."""
    ledger = [table for table in tables if table.name not in {"sessions", *BY_REFERENCE, *NO_TENANT, *SHARED}]
    statements = [statement for table in ledger for statement in _with_tenant(table)]
    statements += [statement for table in ledger for statement in _references(table)]
    for table in tables:
        statements += _session_column() if table.name == "sessions" else []
        statements += _guards(table.name) if table.name not in NO_TENANT else []
    for statement in statements:
        connection.exec_driver_sql(statement)


def _session_column() -> list[str]:
    # A regular expression, as a cast to json fails on NUL in any tag. JSON escapes every quote inside a string.
    member = TENANT_TAG.replace(".", "[.]")
    tenant = f"""coalesce(substring(tags from '[{{,] ?"{member}": ?"([^"]*)"'), '{DEFAULT_TENANT}')"""
    return [
        f"ALTER TABLE sessions ADD COLUMN tenant text NOT NULL GENERATED ALWAYS AS ({tenant}) STORED",
        "CREATE INDEX sessions_by_tenant ON sessions (tenant, id)",
    ]


def _with_tenant(table: sa.Table) -> list[str]:
    """Adds the column and makes it part of the unique keys. Existing rows belong to the default tenant."""
    name, key = table.name, _columns(table.primary_key.columns)
    statements = [
        f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS tenant varchar NOT NULL DEFAULT '{DEFAULT_TENANT}'",
        f"ALTER TABLE {name} ALTER COLUMN tenant SET DEFAULT {SETTING}",
        f"ALTER TABLE {name} ADD CHECK (tenant NOT IN ('', '{EVERY_TENANT}'))",
        f"ALTER TABLE {name} DROP CONSTRAINT {name}_pkey CASCADE",  # with the references to it
        f"ALTER TABLE {name} ADD PRIMARY KEY ({key}, tenant)",
    ]
    for index in table.indexes:
        if index.unique:
            statements.append(f"DROP INDEX {index.name}")
            statements.append(f"CREATE UNIQUE INDEX {index.name} ON {name} ({_columns(index.columns)}, tenant)")
    return statements


def _references(table: sa.Table) -> list[str]:
    return [
        f"ALTER TABLE {table.name} ADD FOREIGN KEY ({key.parent.name}, tenant) "
        f"REFERENCES {key.column.table.name} ({key.column.name}, tenant)"
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name)
    ]


def _guards(name: str) -> list[str]:
    own = BY_REFERENCE.get(name, "false" if name in SHARED else OWN)
    return [
        f"ALTER TABLE {name} ENABLE ROW LEVEL SECURITY",
        f"ALTER TABLE {name} FORCE ROW LEVEL SECURITY",
        f"CREATE POLICY tenants ON {name} USING ({SETTING} = '{EVERY_TENANT}' OR {own})",
    ]


def _columns(columns: Any) -> str:
    return ", ".join(column.name for column in columns)


@event.listens_for(metadata, "after_create")
def _separate_new(target: sa.MetaData, connection: sa.Connection, tables: Sequence[sa.Table] = (), **_: Any) -> None:
    if connection.dialect.name == "postgresql":
        separate(connection, tables)
