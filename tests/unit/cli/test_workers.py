"""The parent of several workers, and workers whose parent or store is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from rolltap.cli import workers
from rolltap.errors import StoreUnavailable
from rolltap.settings import Settings

workers.RETRY_S = workers.PARENT_EVERY_S = 0.02
folder = Path(sys.argv[1])

def serve(settings, number):
    starts = len(list(folder.glob(f"start-{number}-*")))
    (folder / f"start-{number}-{starts}").write_text(str(os.getpid()))
    if number == 1 and starts == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 1 and starts < 4:
        raise StoreUnavailable("away")
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


def test_a_worker_without_a_store_is_waited_for_and_the_others_go_on(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)])
    until(lambda: (tmp_path / "start-1-4").exists())
    assert [path.name for path in tmp_path.glob("start-0-*")] == ["start-0-0"]
    assert lives(int((tmp_path / "start-0-0").read_text()))
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(timeout=20) == 0


def test_workers_end_with_their_parent(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)])
    last = tmp_path / "start-1-4"
    until(lambda: last.exists() and last.read_text() != "")
    workers = [int((tmp_path / name).read_text()) for name in ("start-0-0", "start-1-4")]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(timeout=20)
    until(lambda: not any(map(lives, workers)))
