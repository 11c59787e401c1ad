"""Databases of an older schema, with data in them, come up to ours; newer ones are refused."""

from __future__ import annotations

import importlib.util
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
from rolltap.calllog.open import open_call_log
from rolltap.calllog.schema import VERSION, metadata
from rolltap.calllog.sql import SqlCallLog
from rolltap.calllog.verify import verify
from rolltap.errors import ConfigError, StoreError
from rolltap.ledger.rewards import verify_rewards
from rolltap.tenants import DEFAULT_TENANT, acting_for, tenant_of, tenant_tags

from ..ledger.world import database_url
from .facts import a_completion, a_session, append

OLD_REWARDS = (
    "INSERT INTO policies VALUES ('p', 7, 'hash', false, 'keep', 1.0)",
    "INSERT INTO tasks VALUES ('d', 't', 'do it', '{}', '[]')",
    "INSERT INTO groups (id, task_id, task_digest, policy, n, priority, tags, rule, status, reason, failures, "
    "created_at, generation) VALUES ('g', 't', 'd', 'p', 2, 0, '[]', '{}', 'open', '', 0, 1.0, 1)",
    *(
        "INSERT INTO rollouts (id, group_id, position, status, attempt, scoring, reason, trained_calls, "
        "infra_failures) "
        f"VALUES ('r{number}', 'g', {number}, 'running', 1, 'scored', '', '[]', 0)"
        for number in range(2)
    ),
    """INSERT INTO rewards VALUES ('b', 'r0', 1, 0.1, 'rollout', 'x', '{"why": "ü", "n": 0.3000000000004}', 2.25)""",
    "INSERT INTO rewards VALUES ('a', 'r0', 1, 1.0, 'rollout', 'x', '{}', 3.5)",
    "INSERT INTO rewards VALUES ('c', 'r1', 1, -1e-300, 'rollout', '', '{}', 1784827463.123457)",
)

SESSION, FIRST, SECOND = "01k0000000aaaaaaaaaa", "01k0000000bbbbbbbbbb", "01k0000000cccccccccc"


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        request.getfixturevalue("bare_postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path}/it.db"
    )


async def of_schema_1(url: str) -> None:
    """A database as the first release made it, with a session of two calls, the second still open."""
    database = Database(url)
    await database.start()
    text = (Path(__file__).parent / f"schema_1.{database.dialect_name}.sql").read_text(encoding="utf-8")
    statements = [one for one in text.split(";\n") if one.strip()]

    def make(connection: sa.Connection) -> None:
        for statement in statements:
            connection.exec_driver_sql(statement)

    await database.transact(make)
    await database.close()


async def opened(url: str, *, writable: bool = True) -> SqlCallLog:
    log: CallLog = open_call_log(url, writable=writable)
    await log.start()
    assert isinstance(log, SqlCallLog)
    return log


async def set_version(url: str, version: str) -> None:
    database = Database(url)
    await database.start()
    await database.transact(
        lambda connection: connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{version}'")
    )
    await database.close()


async def test_a_database_of_the_first_schema_is_migrated_with_its_data(url: str):
    await of_schema_1(url)
    log = await opened(url)
    assert await log.database.query(versions.version_of) == VERSION
    session = await log.session_by_key("hash-one")
    assert session is not None
    assert (session.id, session.tags, session.closed_at) == (SESSION, {"tag": "välue"}, 77.25)
    first, second = await log.rows(SESSION)
    assert (first.intent.id, first.delivered, second.intent.id, second.completion) == (FIRST, True, SECOND, None)
    assert second.prompt_ids.tolist() == [*range(40), 4, 5, 7, 8]
    assert (await verify(log.database)).problems == []
    await append(log, a_session())
    await log.append_completion(a_completion(SECOND))
    assert len(await log.rows(SESSION, known={FIRST})) == 1
    await log.close()


async def test_turn_caps_on_record_become_controls(url: str):
    """Schema 15 had a table of turn caps; 0 was none."""
    await (await opened(url)).close()
    policy = "INSERT INTO policies (name, version, tokenizer_hash, given, created_at) VALUES ('{}', 0, '', 0, 1.0)"
    statements = [
        "DROP TABLE controls",
        "DROP INDEX submitted_head",
        "ALTER TABLE processes DROP COLUMN waiting_since",
        "ALTER TABLE policies DROP COLUMN folder",
        "ALTER TABLE policies DROP COLUMN adapter",
        "CREATE TABLE turn_caps (policy VARCHAR PRIMARY KEY, turns INTEGER NOT NULL, tenant VARCHAR DEFAULT 'default')",
        *(policy.format(name) for name in "pq"),
        "INSERT INTO turn_caps (policy, turns) VALUES ('p', 12), ('q', 0)",
    ]
    database = Database(url)
    await database.start()

    def insert(connection: sa.Connection) -> None:
        for statement in statements:
            connection.exec_driver_sql(statement)

    await database.transact(insert)
    await database.close()
    await set_version(url, "0015")
    log = await opened(url)
    columns = sa.text("SELECT policy, max_turns, temperature, n, priority, curriculum FROM controls")
    rows = await log.database.query(lambda connection: connection.execute(columns).all())
    assert [tuple(row) for row in rows] == [("p", 12, None, None, None, None)]
    assert not await log.database.query(lambda connection: sa.inspect(connection).has_table("turn_caps"))
    await log.close()


async def test_tags_on_record_stay_whatever_they_say(url: str):
    """Users could name a tag `tenant`, and Postgres reads no JSON with NUL in it."""
    await of_schema_1(url)
    database = Database(url)
    await database.start()
    tags = r'{"tenant":"Ann\u0000","x\"rolltap.tenant":"acme","y":"{\"rolltap.tenant\":\"acme\"}"}'
    update = sa.text("UPDATE sessions SET tags = :tags")
    await database.transact(lambda connection: connection.execute(update, {"tags": tags}))
    await database.close()
    log = await opened(url)
    session = await log.session(SESSION)
    assert session is not None
    assert (session.tags["tenant"], tenant_of(session.tags)) == ("Ann\0", DEFAULT_TENANT)
    await log.open_session(a_session(id="new", key_hash="new", tags={"model": "a\0", **tenant_tags()}))
    with acting_for("acme"):
        await log.claim_session(a_session(id="acmes", key_hash="acmes", tags={"model": "\0", **tenant_tags()}))
    if log.database.dialect_name == "postgresql":
        select = sa.text("SELECT id, tenant FROM sessions")
        rows = await log.database.query(lambda connection: connection.execute(select).all())
        assert dict(map(tuple, rows)) == {SESSION: DEFAULT_TENANT, "new": DEFAULT_TENANT, "acmes": "acme"}
    await log.close()


async def test_the_migrated_tables_are_the_declared_ones(url: str):
    await of_schema_1(url)
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


async def test_a_migrated_database_separates_tenants_as_a_new_one(bare_postgres_url: str, postgres_server_url: str):
    """By policies, by keys, and by what the column `tenant` is filled with."""
    await of_schema_1(bare_postgres_url)
    walls = (
        "SELECT tablename, qual, with_check FROM pg_policies ORDER BY 1",
        "SELECT relname, relrowsecurity, relforcerowsecurity FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY 1",
        "SELECT conrelid::regclass::text, pg_get_constraintdef(oid) FROM pg_constraint ORDER BY 1, 2",
        "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = 'public' AND indexname NOT LIKE '%_pk%' "
        "ORDER BY indexdef",
        "SELECT table_name, column_default, generation_expression FROM information_schema.columns "
        "WHERE column_name = 'tenant' ORDER BY 1",
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


async def test_the_ledgers_rows_stay(url: str):
    """SQLite can't make a table anew that rows of others point to."""
    await of_schema_1(url)
    database = Database(url)
    await database.start()

    def fill(connection: sa.Connection) -> None:
        connection.exec_driver_sql("INSERT INTO policies VALUES ('p', 7, 'hash', false, 'keep', 1.0)")
        connection.exec_driver_sql("INSERT INTO trainers VALUES ('t', 7)")
        connection.exec_driver_sql("INSERT INTO demands VALUES ('t', 'p', 8, 1, 1.0)")

    await database.transact(fill)
    await database.close()
    log = await opened(url)
    statement = sa.text("SELECT name, version, given, paused, batch FROM policies JOIN demands ON name = policy")
    found = await log.database.query(lambda connection: connection.execute(statement).all())
    assert [tuple(row) for row in found] == [("p", 7, 7, "keep", 8)]
    await log.close()


async def test_rewards_on_record_are_chained_and_kept_from_change(url: str):
    await of_schema_1(url)
    database = Database(url)
    await database.start()

    def fill(connection: sa.Connection) -> None:
        for statement in OLD_REWARDS:
            connection.exec_driver_sql(statement)

    await database.transact(fill)
    await database.close()
    log = await opened(url)
    checked = await verify_rewards(log.database)
    assert (checked.rewards, checked.problems) == (3, [])
    for statement in ("UPDATE rewards SET value = 9", "DELETE FROM rewards"):
        with pytest.raises(StoreError, match="append-only"):
            await log.database.transact(lambda connection, text=statement: connection.exec_driver_sql(text))
    await log.close()


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


async def test_an_older_database_is_not_read_before_it_is_upgraded(url: str):
    await of_schema_1(url)
    with pytest.raises(ConfigError, match="rolltap log upgrade"):
        await opened(url, writable=False)
    await (await opened(url)).close()
    await (await opened(url, writable=False)).close()


async def test_without_alembic_an_older_database_stays_as_it_is(url: str, monkeypatch: pytest.MonkeyPatch):
    await of_schema_1(url)
    with monkeypatch.context() as without:
        find = importlib.util.find_spec
        without.setattr(importlib.util, "find_spec", lambda name: None if name == "alembic" else find(name))
        with pytest.raises(ConfigError, match=r"\[postgres\]"):
            await opened(url)
    database = Database(url)
    await database.start()
    assert await database.query(versions.version_of) == versions.FIRST
    await database.close()


def test_the_declared_version_is_the_last_step():
    assert ScriptDirectory(str(versions.MIGRATIONS)).get_heads() == [VERSION]
