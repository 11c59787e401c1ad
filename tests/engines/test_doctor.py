"""What `rolltap doctor` says of a real vLLM, and what a vLLM without its switches still gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rolltap.types import VersionSpan

from .record import Reference, assert_extends, done, rows_of
from .servers import COMMON, Proxy, proxy, vllm
from .talkers import chat


def doctor(running: Proxy, *, healthy: bool = True) -> str:
    """The doctor's table for the proxy's settings and a store of its own, white space folded."""
    config = running.folder / "doctor.toml"
    config.write_text(running.config.read_text().replace(f"{running.folder / 'data'}", f"{running.folder / 'fresh'}"))
    command = [str(Path(sys.executable).parent / "rolltap"), "doctor", "--config", str(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "400"}, check=False
    )
    assert (done.returncode == 0) is healthy, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_the_doctor_on_a_vllm_with_everything(served: Proxy) -> None:
    told = doctor(served)
    gives = "log-probs processed; a weight version for every token; takes new weights"
    assert "vllm, models tiny" in told  # and the adapters that it was given
    assert f"context 4096; {gives}" in told
    assert "--enable-scale-out" not in told
    assert "VLLM_SERVER_DEV_MODE" not in told
    assert "--logprobs-mode" not in told


@pytest.fixture
def bare(installed: None, tmp_path: Path) -> Iterator[Proxy]:
    """A proxy before a vLLM that was started without the switches of docs/engines.md."""
    for name in ("vllm", "proxy"):
        (tmp_path / name).mkdir()
    with vllm(tmp_path / "vllm", COMMON, {}) as url, proxy(tmp_path / "proxy", url) as running:
        yield running


def test_a_vllm_without_its_switches(bare: Proxy, reference: Reference) -> None:
    """It is asked at `/v1/completions`: ids and log-probs come, token versions are the policy's; the doctor says so."""
    told = doctor(bare, healthy=False)  # it can't load the adapter that one of the policies is served by
    assert "engine main serves no model 'adapted'" in told
    assert "log-probs raw; the policy's weight version; takes no new weights" in told
    assert "--enable-scale-out" in told
    assert "VLLM_SERVER_DEV_MODE=1" in told
    assert "--logprobs-mode processed_logprobs" in told
    session = bare.open_session("tiny")
    with closing(chat(session)) as talker:
        talker.ask("Copy apple.txt to pear.txt.")
        talker.ask("Rename plum.txt to river.txt.")
    rows = rows_of(bare.database, session["session_id"])
    assert_extends(rows)
    for row in rows:
        completion = done(row)
        assert completion.logprobs_mode == "raw"
        assert completion.versions == (VersionSpan(0, 0, len(completion.output_ids)),)
        np.testing.assert_allclose(completion.logprobs, reference.logprobs(row), rtol=0, atol=1e-4)
