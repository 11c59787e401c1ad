"""A run's folder: its id outlives the process, and one process at a time trains in it. Digests of weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolltap.errors import TrainerError
from rolltap.trainer_client.lease.folder import locked, run_id
from rolltap.trainer_client.model.weights import digest_of_folder
from rolltap.weight_transfer import digest_of_tensors


def test_a_folder_keeps_its_id_and_another_has_another(tmp_path: Path) -> None:
    first = run_id(tmp_path / "new" / "out")
    assert first == run_id(tmp_path / "new" / "out") != run_id(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["run-id"]


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    code = "import sys, pathlib\nfrom rolltap.trainer_client.lease.folder import locked\n"
    code += "with locked(pathlib.Path(sys.argv[1])):"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{code}\n    print(1, flush=True)\n    input()", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"1\n"
        with pytest.raises(TrainerError, match="another process trains in"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
    with locked(tmp_path):
        pass


def test_the_digest_is_of_the_tensors_however_they_are_stored(tmp_path: Path) -> None:
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16), "c": torch.tensor(2.5)}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    save_file(weights, whole / "model.safetensors")
    for name, tensor in weights.items():
        save_file({name: tensor}, parts / f"model-{name}.safetensors")
    found = digest_of_tensors(weights)
    assert found == digest_of_folder(whole) == digest_of_folder(parts)
    for changed in (
        {**weights, "a": weights["a"].T.contiguous()},
        {**weights, "c": torch.tensor(2.500001)},
        {**weights, "d": torch.zeros(0)},
        {"a": weights["a"], "b": weights["c"], "c": weights["b"]},
    ):
        assert digest_of_tensors(changed) != found
    assert load_file(whole / "model.safetensors")["c"] == 2.5


def test_a_folder_that_cannot_be_read_has_a_digest_too(tmp_path: Path) -> None:
    """No engine can load it, and says so."""
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert digest_of_folder(tmp_path) != digest_of_folder(tmp_path / "missing")
