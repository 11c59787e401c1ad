"""Brings a database's tables to the version that this rolltap knows.

The version stands in the table `alembic_version`, as Alembic keeps it. At start:

* a database without tables gets all of them as declared, and the version;
* one of our version is used as it is (tables that are missing because only a part of rolltap ran there are made);
* an older one is migrated by Alembic, all steps in one transaction. Databases from before versions were kept are 0001;
* a newer one is refused, and so is an older one that is only to be read, or while Alembic is not installed.

So Alembic is needed in the one moment of an upgrade. It comes with `rolltap[postgres]`; an installation that keeps its
record in SQLite runs without it, and is told to install it for the upgrade of an older file.
"""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import sqlalchemy as sa

from rolltap.calllog import separation as _separation  # noqa: F401  new tables are made behind it
from rolltap.calllog.database import Database, lock_schema
from rolltap.calllog.schema import VERSION, metadata, sessions
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.tenants import EVERY_TENANT, acting_for

FIRST = "0001"
MIGRATIONS = Path(__file__).parent / "migrations"

log = logging.getLogger("rolltap.store")

_versions = sa.Table("alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True))


async def bring_up_to_date(database: Database) -> None:
    """Makes or migrates the tables of a started `database`; `ConfigError` where that can't be done."""
    if database.writable:
        with acting_for(EVERY_TENANT):
            await database.transact(lambda connection: _upgrade(connection, database.name))
        return
    version = await database.query(version_of)
    if version not in (None, VERSION):
        _refuse_newer(database.name, version)
        raise ConfigError(
            f"{database.name} has schema {version}, this rolltap reads {VERSION}; `rolltap log upgrade` brings it up"
        )


def version_of(connection: sa.Connection) -> str | None:
    """The version of the tables; None where there are none."""
    inspector = sa.inspect(connection)
    if inspector.has_table(_versions.name):
        return connection.scalar(sa.select(_versions.c.version_num))
    return FIRST if inspector.has_table(sessions.name) else None


def _upgrade(connection: sa.Connection, name: str) -> None:
    lock_schema(connection)
    version = version_of(connection)
    if version is None:
        metadata.create_all(connection)
        _versions.create(connection, checkfirst=True)
        connection.execute(sa.insert(_versions).values(version_num=VERSION))
        return
    if version != VERSION:
        _refuse_newer(name, version)
        if importlib.util.find_spec("alembic") is None:
            raise ConfigError(
                f"{name} has schema {version}, this rolltap's is {VERSION}: "
                f"{install_line('postgres')} (it brings Alembic) and start again to upgrade it"
            )
        _migrate(connection, version)
        log.warning("%s: schema upgraded from %s to %s", name, version, VERSION)
    metadata.create_all(connection)


def _refuse_newer(name: str, version: str | None) -> None:
    if version is not None and version > VERSION:
        raise ConfigError(f"{name} has schema {version}, this rolltap knows up to {VERSION}: use a newer rolltap")


def _migrate(connection: sa.Connection, version: str) -> None:
    """Runs Alembic's steps after `version`, in the transaction under way."""
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    if not sa.inspect(connection).has_table(_versions.name):
        command.stamp(config, version)
    command.upgrade(config, VERSION)
