"""The contract suite again, in the environments of the trainers that can't share our packages."""

from __future__ import annotations

import os
import subprocess

import pytest

from ..conftest import ROOT
from .proofs import SUITES


@pytest.mark.trainers
@pytest.mark.timeout(600)
@pytest.mark.parametrize("environment", sorted({suite.environment for suite in SUITES.values()} - {""}))
def test_adapters_keep_the_contract_in_their_environment(environment: str) -> None:
    python = ROOT / ".cache" / "trainers" / environment / "bin" / "python"
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "ROLLTAP_TRAINERS": environment}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/trainers/test_contract.py"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
