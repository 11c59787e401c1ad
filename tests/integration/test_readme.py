"""The README's first block, typed into a shell in a fresh folder: scripted model, proxy, client, viewer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import ROOT, free_port

MADE = ("git clone", "python3 -m venv")
"""What a reader's first lines make is this checkout and its environment."""


@pytest.mark.acceptance
def test_the_first_block_shows_a_call_of_ones_own_client(tmp_path: Path) -> None:
    """8 CPU seconds: two servers and four commands, each a process as a reader would start it."""
    text = re.findall(r"^```\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[
        0
    ]
    assert all(re.search(rf"^{line}", text, re.MULTILINE) for line in MADE)
    ports = {plane: free_port() for plane in ("AGENT", "TRAINER", "ADMIN")}
    engine = free_port()
    typed = "".join(line for line in text.splitlines(keepends=True) if not line.startswith(MADE))
    typed = typed.replace("8712", str(ports["ADMIN"])).replace("8720", str(engine))
    typed = typed.replace("engine.toml &", f"engine.toml --port {engine} &")
    for folder in ("examples", "src"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "home").mkdir()
    environment = {
        **{f"ROLLTAP_LISTEN__{plane}_PORT": str(port) for plane, port in ports.items()},
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p); wait' EXIT\n{typed}"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "Done." in done.stdout, done.stderr
    assert re.search(rf"^http://127\.0\.0\.1:{ports['ADMIN']}/view/", done.stdout, re.MULTILINE), done.stdout
