"""The releases of `datasets` that trainers pin read what our manifest says that they read, and nothing is read wrongly
by one that it admits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolltap.reconstructor.exporters.consumers import least_datasets
from rolltap.reconstructor.exporters.sft import Sft

from ..conftest import ROOT

RELEASES = ("4.0.0", "4.3.0", "4.8.4")


def outcomes(python: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "HF_DATASETS_OFFLINE": "1"}
    command = [str(python), "-m", "tests.trainers.datasets_releases"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


def check(release: str, lines: list[str]) -> None:
    assert lines[0] == release
    assert len(lines) == 5
    numbers = tuple(map(int, release.split(".")[:2]))
    for line in lines[1:]:
        case, _, outcome = line.partition(": ")
        container, arguments = case.split()
        least = least_datasets(Sft(arguments=arguments), container)  # type: ignore[arg-type]
        if numbers >= tuple(map(int, least.split("."))):
            assert outcome == "exact", f"{release} {line}"


@pytest.mark.trainers
@pytest.mark.parametrize("release", RELEASES)
def test_a_pinned_release_reads_what_the_manifest_says(release: str) -> None:
    check(release, outcomes(ROOT / ".cache" / "trainers" / f"datasets-{release}" / "bin" / "python"))


def test_the_newest_release_reads_everything() -> None:
    lines = outcomes(Path(sys.executable))
    check(lines[0], lines)
    assert [line.partition(": ")[2] for line in lines[1:]] == ["exact"] * 4
