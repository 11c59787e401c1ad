"""Upgrades a database's tables to the schema version of this rolltap.

The table `alembic_version` holds the version. At start:

* a database without tables gets all declared tables and the current version;
* one with the current version is used (missing tables are created, if only a part of rolltap used it before);
* an older one is migrated by Alembic, all steps in one transaction;
* one older than `INITIAL`, or without a version, is refused: its sessions go to a new store by an archive file;
* one that proxies of an older rolltap use is not migrated by a step that they can't live with (`CUTS_OFF`);
* a newer one is refused, and so is an older one that is opened read-only, or if Alembic is not installed;
* a newer one is read by the reading process of a proxy that was connected when it was upgraded (`newer`).

So Alembic is needed only for an upgrade. It comes with `rolltap[postgres]`. An installation with SQLite runs without
it; the error message asks to install it when an older file needs an upgrade.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import sqlalchemy as sa

from rolltap.calllog.database import Database, lock_schema
from rolltap.calllog.schema import VERSION, metadata, sessions
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.tenants import EVERY_TENANT, acting_for

INITIAL = "0100"
"""The first step. Older tables are not migrated."""

UNVERSIONED = "0000"
"""The version of tables that were made before versions were recorded."""

CUTS_OFF: Sequence[str] = ("0103", "0105")
"""The steps after which a running proxy of an older schema can't work: it would refuse known keys, or write rows that
nobody finds. All other steps only add what an older proxy doesn't look at. 0105 does, too, but a proxy of 0104 starts
its reading process at the first question, and that refuses every newer schema: no rollout could be finished."""

GONE_WITHIN_S = 3.0
"""Seconds for which a proxy that has just ended may still be listed among the connections."""

PROXY = "rolltap proxy"
"""How the names of proxies' connections begin. The third word after it is the schema that the proxy knows."""

MIGRATIONS = Path(__file__).parent / "migrations"

log = logging.getLogger("rolltap.store")

_versions = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


async def bring_up_to_date(database: Database, *, newer: bool = False) -> None:
    """Creates or migrates the tables of a started `database`. Raises `ConfigError` if that is not possible. `newer`: a
    newer schema may be read."""
    if database.writable:
        await _wait_for_older_proxies(database)
        with acting_for(EVERY_TENANT):
            await database.transact(lambda connection: _upgrade(connection, database.name))
        return
    version = await database.query(version_of)
    if version not in (None, VERSION) and not (newer and version > VERSION):
        _refuse_foreign(database.name, version)
        raise ConfigError(
            f"{database.name} has schema {version}, this rolltap reads {VERSION}; run `rolltap log upgrade`"
        )


def version_of(connection: sa.Connection) -> str | None:
    """The version of the tables; None if there are none."""
    inspector = sa.inspect(connection)
    if inspector.has_table(_versions.name):
        return connection.scalar(sa.select(_versions.c.version_num))
    return UNVERSIONED if inspector.has_table(sessions.name) else None


async def _wait_for_older_proxies(database: Database) -> None:
    """Raises `ConfigError` if a step of the upgrade would cut off a proxy that is connected."""
    if database.dialect_name == "sqlite":
        return
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        with acting_for(EVERY_TENANT):
            version, schemas = await database.query(lambda opened: (version_of(opened), _proxies(opened)))
        steps = [step for step in CUTS_OFF if version is not None and version < step <= VERSION]
        older = [schema for schema in schemas if steps and schema < steps[-1]]
        if not older:
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{database.name} has schema {version} and is in use by a proxy of an older rolltap, which the upgrade "
                f"to {VERSION} would cut off; stop all older proxies of this store, then start this one"
            )
        await asyncio.sleep(0.1)


def _proxies(connection: sa.Connection) -> list[str]:
    """The schema that each connected proxy knows; empty for those that don't say."""
    names = sa.text(
        "SELECT DISTINCT application_name FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE :prefix"
    ).bindparams(prefix=f"{PROXY} %")
    return ["".join(name.removeprefix(PROXY).split()[2:3]) for name in connection.scalars(names)]


def _upgrade(connection: sa.Connection, name: str) -> None:
    lock_schema(connection)
    version = version_of(connection)
    if version is None:
        metadata.create_all(connection)
        _versions.create(connection, checkfirst=True)
        connection.execute(sa.insert(_versions).values(version_num=VERSION))
        return
    if version != VERSION:
        _refuse_foreign(name, version)
        if importlib.util.find_spec("alembic") is None:
            raise ConfigError(
                f"{name} has schema {version}, this rolltap's is {VERSION}: "
                f"{install_line('postgres')} (it brings Alembic) and start again to upgrade it"
            )
        _migrate(connection)
        log.warning("%s: schema upgraded from %s to %s", name, version, VERSION)
    metadata.create_all(connection)


def _refuse_foreign(name: str, version: str) -> None:
    """Raises `ConfigError` for tables that this rolltap can neither read nor migrate."""
    if version > VERSION:
        raise ConfigError(f"{name} has schema {version}, this rolltap knows up to {VERSION}: use a newer rolltap")
    if version < INITIAL:
        raise ConfigError(
            f"{name} has schema {version}, this rolltap reads {INITIAL} and later: write its sessions to a file with "
            "the rolltap that made it (`rolltap log export FILE`), then import them into a new store "
            "(`rolltap log import FILE`)"
        )


def _migrate(connection: sa.Connection) -> None:
    """Runs Alembic's steps after the database's version, all of them if it has none, in the current transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, VERSION)
