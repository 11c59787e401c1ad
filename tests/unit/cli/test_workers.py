"""The parent of several workers, and workers whose parent or store is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rolltap.calllog.spool import Spool
from rolltap.cli import serve as workers
from rolltap.errors import ConfigError
from rolltap.settings import Settings

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from rolltap.cli import serve as workers
from rolltap.errors import ConfigError, StoreUnavailable
from rolltap.settings import Settings

workers.RETRY_S = workers.PARENT_EVERY_S = 0.02
folder, fault = Path(sys.argv[1]), {"away": StoreUnavailable, "set": ConfigError, "defect": OSError}[sys.argv[2]]
if len(sys.argv) > 3:
    workers.SOON_S = float(sys.argv[3])

def serve(settings, number):
    starts = len(list(folder.glob(f"start-{number}-*")))
    (folder / f"start-{number}-{starts}").write_text(str(os.getpid()))
    if number == 1 and starts == 0:
        time.sleep(0.5)  # longer than SOON_S, where that is given: the other worker serves
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 1 and starts < 4:
        raise fault("surroundings")
    time.sleep(60)

sys.exit(workers.Watch(Settings(), serve).over(2))
"""


def until(holds: Callable[[], bool]) -> None:
    by = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < by
        time.sleep(0.02)


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("fault", ["away", "set", "defect"])
def test_a_replacement_that_cannot_start_is_tried_again_and_the_others_go_on(fault: str, tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), fault, "0.2"])
    until(lambda: (tmp_path / "start-1-4").exists())
    assert [path.name for path in tmp_path.glob("start-0-*")] == ["start-0-0"]
    assert lives(int((tmp_path / "start-0-0").read_text()))
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=20) == 0


def test_a_server_without_a_worker_that_serves_ends(tmp_path: Path) -> None:
    """Another supervisor may know better."""
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), "set"])
    assert parent.wait(timeout=20) == 2


def test_workers_end_with_their_parent(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), "away"])
    last = tmp_path / "start-1-4"
    until(lambda: last.exists() and last.read_text() != "")
    workers = [int((tmp_path / name).read_text()) for name in ("start-0-0", "start-1-4")]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=20)
    until(lambda: not any(map(lives, workers)))


ON_POSTGRES = "postgresql://127.0.0.1/any"


def test_auto_is_a_worker_a_core_where_the_store_takes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(workers, "CPU_QUOTA", quota)
    shared = Settings.model_validate({"data": tmp_path, "store": {"url": ON_POSTGRES}})
    for text, cores in (("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)):
        quota.write_text(text)
        assert workers.worker_count("auto", shared) == cores
        assert workers.worker_count("auto", Settings.model_validate({"data": tmp_path})) == 1
    spool = Spool(workers.spool_of(tmp_path, 4), 10_000)
    spool.open()
    spool.append([b"a call"])
    spool.close()
    assert workers.worker_count("auto", shared) == 5, "nobody else would send what that spool holds"


@pytest.mark.parametrize("given", ["0", "65", "-1", "two", "", "1.5"])
def test_a_number_of_workers_is_from_1_to_64_or_auto(given: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a number from 1 to 64, or auto"):
        workers.worker_count(given, Settings.model_validate({"data": tmp_path, "store": {"url": ON_POSTGRES}}))
