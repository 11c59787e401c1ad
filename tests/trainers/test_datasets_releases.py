"""The releases of `datasets` that trainers pin read what the page says that they read, and nothing is read wrongly by
one that the manifest admits."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import ROOT

RELEASES = ("4.0.0", "4.3.0", "4.7.0", "4.8.4")
PAGE = runpy.run_path(str(ROOT / "scripts" / "readers_page.py"))


def outcomes(python: Path) -> tuple[str, dict[str, list[str]]]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HF_DATASETS_OFFLINE": "1"}
    command = [str(python), "-m", "tests.trainers.datasets_releases"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    release, found = done.stdout.splitlines()[-2:]
    return release, json.loads(found)


@pytest.mark.trainers
@pytest.mark.parametrize("release", RELEASES)
def test_a_pinned_release_reads_what_the_page_says(release: str) -> None:
    python = ROOT / ".cache" / "trainers" / f"datasets-{release}" / "bin" / "python"
    assert outcomes(python) == (release, PAGE["figures"]()[release])


@pytest.mark.acceptance
def test_the_newest_release_reads_what_the_page_says() -> None:
    """10 CPU seconds: every format and container."""
    release, found = outcomes(Path(sys.executable))
    assert found == PAGE["figures"]()[release]


def test_a_release_that_the_manifest_admits_reads_messages_exactly() -> None:
    """From 4.7 on numbers beside the messages, such as rewards, have ten decimals."""
    for release, found in PAGE["figures"]().items():
        admitted = [label for label in found if " text " in label or release >= "4.7"]
        for label in admitted:
            if label.partition(" ")[0] in ("sft", "preference", "kto"):
                assert set(found[label]) <= {"exact", "rounded"}, (release, label)


def test_texts_of_10_mb_are_read_exactly() -> None:
    assert {one for found in PAGE["figures"]().values() for each in found.values() for one in each[2:]} == {"exact"}


def test_the_page_has_the_tables() -> None:
    assert f"{PAGE['consumers']()}\n{PAGE['table']()}" in PAGE["PAGE"].read_text(encoding="utf-8")
