"""A copy of what an agent wrote takes no more than the original, and no more than its budget."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rolltap.errors import Unreadable
from rolltap.harnesses.left_files import CopyBudget, LeftFiles

MB = 1 << 20


@pytest.fixture
def left(tmp_path: Path) -> Path:
    (tmp_path / "left").mkdir()
    return tmp_path / "left"


@pytest.mark.parametrize("ends", ["hole", "data"])
def test_holes_stay_holes_and_count_nothing(ends: str, left: Path, tmp_path: Path) -> None:
    with (left / "sparse").open("wb") as file:
        file.write(b"begin")
        file.seek(300 * MB)
        file.write(b"middle")
        if ends == "hole":
            file.truncate(600 * MB)
    budget = CopyBudget(MB, 1)
    budget.copy(LeftFiles(left), "sparse", tmp_path / "copy")
    copy = tmp_path / "copy"
    assert copy.stat().st_size == (left / "sparse").stat().st_size
    assert copy.stat().st_blocks * 512 < MB
    assert copy.stat().st_mtime_ns == (left / "sparse").stat().st_mtime_ns
    with copy.open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(300 * MB)
        assert file.read(6) == b"middle"


def test_a_copy_has_no_rights_of_another_user(left: Path, tmp_path: Path) -> None:
    (left / "program").write_text("x")
    (left / "program").chmod(0o6755)
    CopyBudget(MB, 1).copy(LeftFiles(left), "program", tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("kind", ["bytes", "files", "pipe", "link", "link on the way", "folder"])
def test_what_is_not_copied(kind: str, left: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("x" * 100)
    path = "inner/secret" if kind == "link on the way" else "secret"
    if kind == "pipe":
        os.mkfifo(left / "secret")
    elif kind == "link":
        (left / "secret").symlink_to(tmp_path / "other/secret")
    elif kind == "link on the way":
        (left / "inner").symlink_to(tmp_path / "other")
    elif kind == "folder":
        (left / "secret").mkdir()
    else:
        (left / "secret").write_text("x" * 100)
    budget = CopyBudget(99 if kind == "bytes" else MB, 0 if kind == "files" else 1)
    with pytest.raises(Unreadable):
        budget.copy(LeftFiles(left), path, tmp_path / "copy")
