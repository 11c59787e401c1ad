"""`examples/real-model`, small: a GGUF of our own, recorded, fine-tuned by TRL on the export, two GRPO steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .. import tiny_gguf
from ..conftest import ROOT

EXAMPLE = ROOT / "examples" / "real-model"
CONVERT = (
    "import sys; from pathlib import Path; from fetch import convert; convert(Path(sys.argv[1]), Path(sys.argv[2]))"
)


@pytest.mark.timeout(900)
def test_a_converted_model_is_recorded_fine_tuned_and_trained(tmp_path: Path) -> None:
    """Takes some 110 CPU seconds: eight stacks of engine and proxy, TRL twice, and a trainer."""
    tiny_gguf.write(tmp_path / "tiny.gguf")
    model, out = tmp_path / "model", tmp_path / "out"
    subprocess.run([sys.executable, "-c", CONVERT, tmp_path / "tiny.gguf", model], cwd=EXAMPLE, check=True)
    command = [sys.executable, EXAMPLE / "real_model.py", out, "--model", model, "--small", "--stages"]
    subprocess.run([*command, "record", "sft"], check=True)
    subprocess.run([*command, "grpo", "trl"], check=True)
    results = json.loads((out / "results.json").read_text())
    assert results["record"]["right"]["success"] == 1.0
    assert 0 < results["record"]["errs"]["success"] < 1
    assert sum(results["record"]["right"]["kinds"].values()) == len(results["record"]["right"]["kinds"])
    right, errs = (load_file(out / f"sft-{name}" / "model.safetensors") for name in ("right", "errs"))
    first = load_file(model / "model.safetensors")
    assert right.keys() == errs.keys() == first.keys()
    assert all(not weight.equal(first[name]) for name, weight in right.items() if "norm" not in name)
    assert any(not weight.equal(right[name]) for name, weight in errs.items())
    for stage in ("grpo", "trl"):
        assert len(results[stage]["curve"]) == len(results[stage]["steps"]) == 2
        assert [step["version"] for step in results[stage]["steps"]] == [1, 2]
    assert all(step["mismatch_mean"] is None or step["mismatch_mean"] < 0.05 for step in results["grpo"]["steps"])
