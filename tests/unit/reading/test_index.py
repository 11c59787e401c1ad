"""The file behind the list of sessions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

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
