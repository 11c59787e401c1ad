"""Two versions of rolltap on one Postgres store."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from rolltap.calllog import versions
from rolltap.calllog.processes import KeysMark
from rolltap.calllog.schema import VERSION
from rolltap.errors import ConfigError

from .test_versions import NEXT, add_step, opened


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "GONE_WITHIN_S", 0.3)


@pytest.mark.parametrize("name", ["rolltap proxy 1a2b 3c4d", "rolltap proxy 1a2b 3c4d 0100"])
async def test_an_upgrade_does_not_cut_off_a_proxy_that_is_connected(
    bare_postgres_url: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await opened(bare_postgres_url)).close()
    add_step(tmp_path, monkeypatch)
    monkeypatch.setattr(versions, "CUTS_OFF", (NEXT,))
    older = await asyncpg.connect(bare_postgres_url, server_settings={"application_name": name})
    with pytest.raises(ConfigError, match="stop all older proxies of this store"):
        await opened(bare_postgres_url)
    assert await older.fetchval("SELECT version_num FROM alembic_version") == VERSION
    await older.close()
    await (await opened(bare_postgres_url)).close()


@pytest.mark.parametrize("name", ["psql", "rolltap", f"rolltap proxy 1a2b 3c4d {NEXT}"])
async def test_others_may_be_connected(
    bare_postgres_url: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await (await opened(bare_postgres_url)).close()
    add_step(tmp_path, monkeypatch)
    monkeypatch.setattr(versions, "CUTS_OFF", (NEXT,))
    other = await asyncpg.connect(bare_postgres_url, server_settings={"application_name": name})
    await (await opened(bare_postgres_url)).close()
    await other.close()


def test_a_proxys_connections_say_which_schema_it_knows() -> None:
    name = KeysMark("0123456789abcdef", "0123456789abcdef").application
    assert name.split()[4] == VERSION
    assert len(name) <= 63  # Postgres cuts longer ones
