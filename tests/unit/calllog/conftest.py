from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolltap.calllog.sql import SqlCallLog, open_call_log


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("postgres_url") if request.param == "postgres" else f"sqlite:///{tmp_path}/log.db"


@pytest.fixture
async def sql_log(store_url: str) -> AsyncIterator[SqlCallLog]:
    """A log on each database."""
    log = open_call_log(store_url)
    await log.start()
    yield log
    await log.close()
