"""The tables of the call log, the triggers of append-only tables, and row-level security.

The ledger declares its own tables on the same `metadata`.

Fields that queries search or join have their own columns. The other fields are in `detail` (JSON text) and in the
binary columns of `rolltap.calllog.codec`. `crc` is the CRC-32 of the row's other columns. Ids come from `rolltap.ids`.

There are no foreign keys between these tables: one process writes a call's rows in their order, and a reference check
would cost row locks between processes. `rolltap log verify` checks the references instead.

A change here or in the ledger's tables needs a migration in `migrations/versions` and a new `VERSION` (see
`rolltap.calllog.versions`). A test compares the migrated tables with these.

Triggers refuse UPDATE, DELETE and TRUNCATE on append-only tables. Somebody who may alter tables can drop a trigger. For
that case rewards are chained (`rolltap.ledger.rewards`).

Row-level security keeps tenants apart on Postgres in every statement. A transaction acts for the tenant in the setting
`rolltap.tenant` (`rolltap.calllog.postgres` sets it). The tenant of a session and of its calls is in the session's
tags. Every table of the ledger has a column `tenant`, whose default is the setting. It is part of primary and foreign
keys, so two tenants may use the same names, and no row refers to another tenant's. rolltap's statements do not name the
column, except in keys. Tenants share request parts by hash; they are read as `EVERY_TENANT` for calls that the tenant
may see (`every_row`).

This protects against statements without a tenant condition. It does not protect against somebody who runs SQL as the
proxy's role, who can set `rolltap.tenant`. Superusers and roles with BYPASSRLS are not restricted (`check_separation`).
On SQLite there is only one tenant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from rolltap.errors import ConfigError
from rolltap.tenants import DEFAULT_TENANT, EVERY_TENANT, NOBODY, TENANT_NAME, TENANT_TAG, current_tenant
from rolltap.wording import is_moment

VERSION = "0106"
"""The last migration: the version of these tables."""

SESSION_PRUNED = "EXISTS (SELECT 1 FROM prunings p WHERE p.session_id = OLD.session_id)"


def append_only(table: sa.Table, *, until: Mapping[str, str] | None = None) -> None:
    """Creates the triggers together with the table.

    `until`: by dialect, the condition on the row `OLD` on which it may be deleted after all.
    """
    for dialect in ("sqlite", "postgresql"):
        for statement in guards(table.name, dialect, until=(until or {}).get(dialect, "")):
            event.listen(table, "after_create", sa.DDL(statement.replace("%", "%%")).execute_if(dialect=dialect))


def guards(table: str, dialect: str, *, until: str = "") -> list[str]:
    """The statements that create the triggers of a table. See `append_only`."""
    if dialect == "sqlite":
        refuse = f"BEGIN SELECT RAISE(ABORT, '{table} are append-only'); END"
        unless = f"WHEN NOT {until} " if until else ""
        return [
            f"CREATE TRIGGER {table}_no_update BEFORE UPDATE ON {table} {refuse}",
            f"CREATE TRIGGER {table}_no_delete BEFORE DELETE ON {table} {unless}{refuse}",
        ]
    function = f"{table}_{'until_pruned' if until else 'append_only'}()"
    allow = f"IF TG_OP = 'DELETE' THEN IF {until} THEN RETURN OLD; END IF; END IF; " if until else ""
    return [
        f"CREATE OR REPLACE FUNCTION {function} RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN {allow}RAISE EXCEPTION '{table} are append-only'; END $$",
        f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION {function}",
        f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {function}",
    ]


metadata = sa.MetaData()

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("key_hash", sa.Text, nullable=False, unique=True),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("expires_at", sa.Double, nullable=False),
    sa.Column("rollout_id", sa.Text, index=True),
    sa.Column("closed_at", sa.Double),
    sa.Column("tags", sa.Text, nullable=False),
    sa.Column("log_check", sa.Text),  # JSON; set once, after the session is closed
    sa.Column("origin_session", sa.Text, index=True),  # of a fork: its origin's session and call
    sa.Column("origin_call", sa.Text),
    sa.Column("origin_at", sa.Integer),  # tokens of that call's reply; None: the whole reply
)

parts = sa.Table(
    "parts",
    metadata,
    sa.Column("hash", sa.LargeBinary, primary_key=True),  # SHA-256 of the part
    sa.Column("seen_at", sa.Double, nullable=False),  # when a writer last used it: `prune` keeps recent ones
    sa.Column("data", sa.LargeBinary, nullable=False),
)

call_intents = sa.Table(
    "call_intents",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("process", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("agent", sa.Text, nullable=False),
    sa.Column("parent_id", sa.Text),
    sa.Column("shared", sa.Integer, nullable=False),
    sa.Column("items_shared", sa.Integer, nullable=False),
    sa.Column("crc", sa.BigInteger, nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("part_hashes", sa.LargeBinary, nullable=False),  # of the request's large parts, one after the other
    sa.Column("lineage", sa.LargeBinary, nullable=False),
    sa.Column("new_ids", sa.LargeBinary, nullable=False),
    sa.Column("request", sa.LargeBinary, nullable=False),
    sa.Index("call_intents_of_session", "session_id", "id"),
)

call_completions = sa.Table(
    "call_completions",
    metadata,
    sa.Column("call_id", sa.Text, primary_key=True),
    sa.Column("presumed", sa.Boolean, nullable=False),  # presumed aborted, for a process that seemed dead
    sa.Column("finished_at", sa.Double, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("finish", sa.Text, nullable=False),
    sa.Column("flaw", sa.Text),
    sa.Column("crc", sa.BigInteger, nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("output_ids", sa.LargeBinary, nullable=False),
    sa.Column("logprobs", sa.LargeBinary, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
    sa.Column("extras", sa.LargeBinary, nullable=False),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    sa.Column("call_id", sa.Text, primary_key=True),
    sa.Column("delivered", sa.Boolean, nullable=False),
)

processes = sa.Table(
    "processes",  # that write to this log
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("seen_at", sa.Double, nullable=False),  # by the database's clock
    sa.Column("complete_to", sa.Text, nullable=False),  # all its calls with a smaller id are complete
    sa.Column("waiting_since", sa.Double),  # since then it has facts that are not in the store; None: it has none
)

prunings = sa.Table(
    "prunings",  # sessions whose calls `rolltap log prune` removed
    metadata,
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("calls", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),  # "acknowledged" or "exported"
)

notes = sa.Table(
    "notes",  # scores, labels, comments and tags that were added to sessions and calls
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("call_id", sa.Text),  # None: the whole session
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("value", sa.Text, nullable=False),  # JSON
    sa.Column("author", sa.Text, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Index("notes_of_session", "session_id", "id"),
)

annotations = sa.Table(
    "annotations",  # trainers' values for sampled tokens
    metadata,
    sa.Column("call_id", sa.Text, primary_key=True),
    sa.Column("token", sa.BigInteger, primary_key=True),  # the lease's fencing token
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("group_id", sa.Text, nullable=False),
    sa.Column("policy", sa.Text, nullable=False),
    sa.Column("harness", sa.Text, nullable=False),
    sa.Column("trainer", sa.Text, nullable=False),
    sa.Column("step", sa.BigInteger),  # the step of the lease's acknowledgement; None: not yet
    sa.Column("version", sa.Integer, nullable=False),  # weight version of the trainer's log-probs
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("compared", sa.Integer, nullable=False),  # number of tokens with a log-prob of trainer and engine
    sa.Column("mismatch_sum", sa.Double, nullable=False),  # sum of |log(trainer / engine)| over them
    sa.Column("mismatch_max", sa.Double, nullable=False),
    sa.Column("fresh", sa.Integer, nullable=False),  # number of compared tokens that `version` sampled
    sa.Column("fresh_sum", sa.Double, nullable=False),
    sa.Column("kept", sa.Integer, nullable=False),
    sa.Column("clipped", sa.Integer, nullable=False),
    sa.Column("streams", sa.LargeBinary, nullable=False),
    sa.Index("annotations_of_session", "session_id", "token"),
    sa.Index(
        "annotations_of_policy",  # covers the queries for sums, so that they read no row
        *("policy", "group_id", "harness", "call_id", "token", "compared", "mismatch_sum", "mismatch_max"),
        *("fresh", "fresh_sum", "kept", "clipped"),
    ),
)

append_only(annotations, until=dict.fromkeys(("sqlite", "postgresql"), SESSION_PRUNED))

for _table in (parts, call_intents, call_completions):
    for _column in _table.columns:
        if isinstance(_column.type, sa.LargeBinary) or _column.name == "detail":
            # The values are compressed already, so Postgres must not compress them again.
            _ddl = sa.DDL(f"ALTER TABLE {_table.name} ALTER COLUMN {_column.name} SET STORAGE EXTERNAL")
            event.listen(_table, "after_create", _ddl.execute_if(dialect="postgresql"))


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


def column_problem(column: sa.Column[Any], value: Any) -> str:
    """What makes a value none of the column's, such as SQLite takes in each; "" if nothing does."""
    if value is None:
        return "" if column.nullable else "no value"
    kind = column.type
    if isinstance(kind, sa.Boolean):
        return "" if value in (0, 1) and isinstance(value, int) else "neither true nor false"
    if isinstance(kind, sa.LargeBinary):
        return "" if isinstance(value, bytes) else "not bytes"
    if isinstance(kind, sa.Text):
        return "" if isinstance(value, str) and "\0" not in value else "not a text"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number"
    if isinstance(kind, sa.Double):
        if column.name == "at" or column.name.endswith("_at"):
            return "" if is_moment(value) else "no possible time"
        return "" if math.isfinite(value) else "not finite"
    bits = 63 if isinstance(kind, sa.BigInteger) else 31
    return "" if isinstance(value, int) and -1 << bits <= value < 1 << bits else f"not an integer of {bits + 1} bits"


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
    statements += [
        f"ALTER TABLE {table.name} ADD FOREIGN KEY ({key.parent.name}, tenant) "
        f"REFERENCES {key.column.table.name} ({key.column.name}, tenant)"
        for table in ledger
        for key in sorted(table.foreign_keys, key=lambda key: key.parent.name)
    ]
    for table in tables:
        if table.name == "sessions":
            tenant = f"coalesce(substring(tags from '{TENANT_IN_TAGS}'), '{DEFAULT_TENANT}')"
            statements += [
                f"ALTER TABLE sessions ADD COLUMN tenant text NOT NULL GENERATED ALWAYS AS ({tenant}) STORED",
                "CREATE INDEX sessions_by_tenant ON sessions (tenant, id)",
            ]
        statements += _guards(table.name) if table.name not in NO_TENANT else []
    for statement in statements:
        connection.exec_driver_sql(statement)


TENANT_IN_TAGS = '[{{,] ?"{}": ?"([^"]*)"'.format(TENANT_TAG.replace(".", "[.]"))
"""How Postgres finds a session's tenant in the text of its tags. A regular expression, as a cast to json fails on NUL
in any tag. JSON escapes every quote inside a string."""


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
