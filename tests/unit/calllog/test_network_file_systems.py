"""A SQLite store on a network's file system is warned of."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolltap.calllog import sqlite
from rolltap.calllog.sql import open_call_log
from rolltap.calllog.sqlite import file_system_of

MOUNTS = """\
/dev/sda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/me/fast\\040disk tmpfs rw 0 0
/dev/sdb /data ext4 rw 0 0
host:/data /data fuse.sshfs rw 0 0
"""


def test_the_kind_is_that_of_the_nearest_mount_and_of_the_last_one_there(tmp_path: Path) -> None:
    (mounts := tmp_path / "mounts").write_text(MOUNTS)
    kinds = {
        place: file_system_of(Path(place), mounts)
        for place in ("/home/me/run", "/home/me/fast disk/run", "/homes", "/data/x")
    }
    assert list(kinds.values()) == ["nfs4", "tmpfs", "ext4", "fuse.sshfs"]
    assert file_system_of(tmp_path, tmp_path / "nowhere") == "unknown"


@pytest.mark.parametrize(
    ("kind", "warned"), [*((each, True) for each in ("cifs", "fuse.sshfs", "nfs4")), ("ext4", False)]
)
async def test_a_store_on_one_is_warned_of(
    kind: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite, "file_system_of", lambda folder: kind)
    log = open_call_log(f"sqlite:///{tmp_path}/store.db")
    await log.start()
    await log.close()
    assert (f"is on a network's file system ({kind})" in caplog.text) == warned
