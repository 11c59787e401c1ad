"""The file behind the list of sessions."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from rolltap.calllog.sql import open_call_log
from rolltap.errors import StoreUnavailable
from rolltap.reading.index import SessionIndex
from rolltap.reading.types import SessionQuery


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_holds_the_records_words_so_nobody_else_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "record.index"
    umask = os.umask(0)
    try:
        SessionIndex(path).open()
        assert (mode(path.parent), mode(path)) == (0o700, 0o600)
        path.chmod(0o644)  # as it was made before
        SessionIndex(path).open()
        assert mode(path) == 0o600
    finally:
        os.umask(umask)


def test_a_place_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    path = tmp_path / "cache" / "record.index"
    with pytest.raises(StoreUnavailable, match=r"record\.index can't be made"):
        SessionIndex(path).open()


def test_a_link_in_its_place_leads_to_no_other_database(tmp_path: Path) -> None:
    """Who sends somebody a folder with a store may have put it there."""
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE precious (value TEXT)")
    before, mode_before = other.read_bytes(), mode(other)
    (tmp_path / "store.db.index").symlink_to(other)
    with pytest.raises(StoreUnavailable, match=r"store\.db\.index can't be made"):
        SessionIndex(tmp_path / "store.db.index").open()
    assert (other.read_bytes(), mode(other)) == (before, mode_before)


async def test_a_link_in_the_place_of_a_stores_lock_leads_to_no_other_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "store.db.lock").symlink_to(other)
    log = open_call_log(f"sqlite:///{tmp_path / 'store.db'}")
    with pytest.raises(StoreUnavailable, match="can't be reached"):
        await log.start()
    await log.close()
    assert other.read_text() == "precious"


@pytest.mark.parametrize(
    "query",
    [
        SessionQuery(where=(" and ".join(["calls>=0"] * 3000),)),
        SessionQuery(where=("calls>=0",) * 3000),
        SessionQuery(search="\0"),
        SessionQuery(search='a\0b "'),
    ],
    ids=["one condition", "many conditions", "NUL", "NUL in words"],
)
def test_no_query_is_an_error_of_the_database(query: SessionQuery, tmp_path: Path) -> None:
    index = SessionIndex(tmp_path / "index.db")
    index.open()
    assert index.page(query) == ([], 0)
    assert index.facets(query) is not None
