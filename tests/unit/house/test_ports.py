"""The ports that tests give their servers: runs side by side never give out the same one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = "from tests.conftest import free_port; print(*(free_port() for _ in range(30)), flush=True); input()"


@pytest.mark.acceptance
def test_processes_side_by_side_give_out_no_port_twice() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    ports: list[bytes] = []
    for process in processes:
        assert process.stdout is not None
        ports += process.stdout.readline().split()
    for process in processes:
        process.communicate(b"\n")
    assert len(ports) == 90
    assert len(set(ports)) == 90
