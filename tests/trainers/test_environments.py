"""Trainers in environments of their own: what theirs makes of our rows and files."""

from __future__ import annotations

import os
import subprocess

import pytest

from ..conftest import ROOT

CHECKS = {
    "cookbook": ("tinker-cookbook-0.5.8", "24 rows are the same"),
    "verl_sft": ("verl-0.9.1", "4 rows of sft-tokens and 9 of sft carry loss on the sampled tokens; 2 prompts"),
    "axolotl_rows": ("axolotl-0.19.0", "9 conversations, 18 replies carry loss on the sampled tokens"),
    "swift_rows": ("ms-swift-4.6.0", "9 conversations with 9 calls, their marks and thinking"),
    "unsloth_rows": ("unsloth-2026.10.9", "18 replies carry loss on the sampled tokens; a step"),
    "llama_factory": ("llamafactory-0.9.5", "8 conversations and 18 replies carry loss on the sampled tokens; a step"),
    "verifiers_traces": ("verifiers-0.4.0", "4 episodes, 6 branches with our ids, masks and log-probs"),
    "nemo_gym_rollouts": ("python-3.12", "4 rollouts of 2 tasks, 8 replies with our ids and log-probs"),
    "skyrl_files": ("python-3.12", "3 rows of JSONL and 3 of Parquet with our ids and masks; 3 prompts"),
}
"""Module of this folder → its environment, and the last line that it writes."""


@pytest.mark.trainers
@pytest.mark.parametrize("module", CHECKS)
def test_a_trainer_reads_what_we_wrote(module: str) -> None:
    folder, line = CHECKS[module]
    python = ROOT / ".cache" / "trainers" / folder / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [str(python), "-m", f"tests.trainers.{module}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == line
