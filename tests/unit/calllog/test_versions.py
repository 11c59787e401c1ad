"""The first step makes the declared tables, a later one keeps what is on record, and databases of other versions are
refused in one line."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import rolltap.ledger.schema  # noqa: F401  declares the ledger's tables on the same metadata
from rolltap.calllog import versions
from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallLog
from rolltap.calllog.schema import VERSION, metadata
from rolltap.calllog.sql import SqlCallLog, open_call_log
from rolltap.errors import ConfigError
from rolltap.tenants import DEFAULT_TENANT, EVERY_TENANT, acting_for, tenant_of, tenant_tags

from ..ledger.world import database_url
from .facts import a_session


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        request.getfixturevalue("bare_postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path}/it.db"
    )


async def opened(url: str, *, writable: bool = True) -> SqlCallLog:
    log: CallLog = open_call_log(url, writable=writable)
    await log.start()
    return log


async def made_by_steps(url: str) -> None:
    """A database whose tables Alembic's steps made, from the first one on."""
    database = Database(url)
    await database.start()
    with acting_for(EVERY_TENANT):
        await database.transact(versions._migrate)
    await database.close()


NEXT = "9000"


def add_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later rolltap, with one more step."""
    migrations = folder / "migrations"
    shutil.copytree(versions.MIGRATIONS, migrations)
    step = f"""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{NEXT}", "{VERSION}"


def upgrade() -> None:
    op.add_column("deliveries", sa.Column("added", sa.Text))
"""
    (migrations / "versions" / f"{NEXT}_step.py").write_text(step, encoding="utf-8")
    monkeypatch.setattr(versions, "MIGRATIONS", migrations)
    monkeypatch.setattr(versions, "VERSION", NEXT)


async def set_version(url: str, version: str) -> None:
    database = Database(url)
    await database.start()
    await database.transact(
        lambda connection: connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
    )
    await database.close()


async def test_tags_on_record_stay_whatever_they_say(url: str):
    """Users could name a tag `tenant`, and Postgres reads no JSON with NUL in it."""
    kept = a_session()
    first = await opened(url)
    await first.open_session(kept)
    await first.close()
    database = Database(url)
    await database.start()
    tags = r'{"tenant":"Ann\u0000","x\"rolltap.tenant":"acme","y":"{\"rolltap.tenant\":\"acme\"}"}'
    update = sa.text("UPDATE sessions SET tags = :tags")
    await database.transact(lambda connection: connection.execute(update, {"tags": tags}))
    await database.close()
    log = await opened(url)
    session = await log.session(kept.id)
    assert session is not None
    assert (session.tags["tenant"], tenant_of(session.tags)) == ("Ann\0", DEFAULT_TENANT)
    await log.open_session(a_session(id="new", key_hash="new", tags={"model": "a\0", **tenant_tags()}))
    with acting_for("acme"):
        await log.claim_session(a_session(id="acmes", key_hash="acmes", tags={"model": "\0", **tenant_tags()}))
    if log.database.dialect_name == "postgresql":
        select = sa.text("SELECT id, tenant FROM sessions")
        rows = await log.database.query(lambda connection: connection.execute(select).all())
        assert dict(map(tuple, rows)) == {kept.id: DEFAULT_TENANT, "new": DEFAULT_TENANT, "acmes": "acme"}
    await log.close()


async def test_the_migrated_tables_are_the_declared_ones(url: str):
    await made_by_steps(url)
    log = await opened(url)

    def differences(connection: sa.Connection) -> list[object]:
        options = {"compare_type": True, "include_object": declared}
        return compare_metadata(MigrationContext.configure(connection, opts=options), metadata)

    def declared(_: object, name: str | None, kind: str, *__: object) -> bool:
        """What separates tenants is the database's own: `test_a_migrated_database_separates_tenants_as_a_new_one`."""
        separating = kind == "foreign_key_constraint" or name in ("tenant", "rollouts_by_group", "sessions_by_tenant")
        return log.database.dialect_name == "sqlite" or not separating

    assert await log.database.query(differences) == []
    await log.close()


async def test_a_migrated_file_has_the_triggers_and_indexes_of_a_new_one(tmp_path: Path):
    declared: list[list[tuple[Any, ...]]] = []
    for name, make in (("migrated", made_by_steps), ("new", None)):
        url = f"sqlite:///{tmp_path / name}.db"
        if make is not None:
            await make(url)
        log = await opened(url)
        text = "SELECT type, name, sql FROM sqlite_master WHERE type IN ('trigger', 'index') ORDER BY 1, 2"
        rows = await log.database.query(lambda connection, sql=text: connection.exec_driver_sql(sql).all())
        declared.append([tuple(row) for row in rows])
        await log.close()
    migrated, new = declared
    assert migrated == new
    assert len([row for row in new if row[0] == "trigger"]) >= 6


async def test_a_migrated_database_separates_tenants_as_a_new_one(bare_postgres_url: str, postgres_server_url: str):
    """By policies, by keys, and by what the column `tenant` is filled with."""
    await made_by_steps(bare_postgres_url)
    walls = (
        "SELECT tablename, qual, with_check FROM pg_policies ORDER BY 1",
        "SELECT relname, relrowsecurity, relforcerowsecurity FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY 1",
        "SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint ORDER BY 1, 2",
        "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public' AND indexname NOT LIKE '%_pk%' "
        "ORDER BY indexdef",
        "SELECT table_name, column_default, generation_expression FROM information_schema.columns "
        "WHERE column_name = 'tenant' ORDER BY 1",
        "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1",
    )
    databases: list[list[tuple[Any, ...]]] = []
    async with database_url("postgresql", Path(), postgres_server_url) as new:
        for url in (bare_postgres_url, new):
            log = await opened(url)
            read = [
                await log.database.query(lambda connection, sql=sql: connection.exec_driver_sql(sql).all())
                for sql in walls
            ]
            databases.append([tuple(row) for rows in read for row in rows])
            await log.close()
    migrated, made = databases
    assert migrated == made
    guarded = {row[0] for row in made if row[1:] == (True, True)}
    assert guarded == set(metadata.tables) - {"processes"}


async def test_a_new_database_has_the_last_version_and_needs_no_step(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "alembic" else True)
    for _ in range(2):
        log = await opened(url)
        assert await log.database.query(versions.version_of) == VERSION
        await log.close()


async def test_a_newer_database_is_refused_with_one_line(url: str):
    await (await opened(url)).close()
    await set_version(url, "9999")
    for writable in (True, False):
        with pytest.raises(ConfigError, match=rf"has schema 9999, .* up to {VERSION}: use a newer rolltap") as refused:
            await opened(url, writable=writable)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", ["0019", None])
async def test_a_database_of_an_older_state_is_refused_and_stays_as_it_is(url: str, version: str | None):
    await (await opened(url)).close()
    database = Database(url)
    await database.start()
    old = "DROP TABLE alembic_version" if version is None else f"UPDATE alembic_version SET version_num = '{version}'"
    await database.transact(lambda connection: connection.exec_driver_sql(old))
    await database.close()
    for writable in (True, False):
        with pytest.raises(ConfigError, match=r"`rolltap log export FILE`.*`rolltap log import FILE`") as refused:
            await opened(url, writable=writable)
        assert "\n" not in str(refused.value)
    database = Database(url)
    await database.start()
    assert await database.query(versions.version_of) == (version or versions.UNVERSIONED)
    await database.close()


async def test_a_step_keeps_what_is_on_record(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = a_session()
    log = await opened(url)
    await log.open_session(kept)
    await log.close()
    add_step(tmp_path, monkeypatch)
    log = await opened(url)
    assert await log.database.query(versions.version_of) == NEXT
    assert await log.session(kept.id) == kept
    columns = await log.database.query(lambda connection: sa.inspect(connection).get_columns("deliveries"))
    assert "added" in {column["name"] for column in columns}
    await log.close()


async def test_an_older_database_is_not_read_before_it_is_upgraded(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await (await opened(url)).close()
    add_step(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="rolltap log upgrade"):
        await opened(url, writable=False)
    await (await opened(url)).close()
    await (await opened(url, writable=False)).close()


async def test_without_alembic_an_older_database_stays_as_it_is(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    await (await opened(url)).close()
    add_step(tmp_path, monkeypatch)
    with monkeypatch.context() as without:
        find = importlib.util.find_spec
        without.setattr(importlib.util, "find_spec", lambda name: None if name == "alembic" else find(name))
        with pytest.raises(ConfigError, match=r"\[postgres\]"):
            await opened(url)
    database = Database(url)
    await database.start()
    assert await database.query(versions.version_of) == VERSION
    await database.close()


def test_the_declared_version_is_the_last_step():
    assert ScriptDirectory(str(versions.MIGRATIONS)).get_heads() == [VERSION]
