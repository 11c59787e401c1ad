"""The GPU benchmark runs to its table on a machine without one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltap.types import NO_VERSION, Segment

from ...bench.bench_trainer_gpu import CPU, Shape, main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is a benchmark of ten minutes")
@pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and TRL about themselves
def test_without_a_gpu_it_compares_a_tiny_model(tmp_path: Path) -> None:
    main(["--minutes", "0.01", "--report", str(tmp_path / "report.json")])
    found = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [(one["model"], one["trainer"]) for one in found] == [("tiny", "rolltap"), ("tiny", "trl")]
    assert all(one["tokens_per_s"] > 0 and one["steps"] >= 1 and not one["failure"] for one in found)


def test_flops_are_counted_by_hand() -> None:
    """One layer of width 2 with one head of 2, inner 3, vocabulary 5: four tokens, one of them trained."""
    shape = Shape("hand", 2, 1, 1, 1, 2, 3, 5, 1, 4)
    row = Segment(
        np.zeros(4, np.int32),
        np.array([False, False, False, True]),
        np.zeros(4, np.float32),
        np.array([NO_VERSION] * 3 + [0], np.int32),
        (),
    )
    weights = 2 * 2 * 4 + 3 * 2 * 3
    assert shape.flops([row]) == 6 * weights * 4 + 6 * 2 * 5 * 1 + 6 * 1 * 1 * 2 * 16
    assert CPU[0].flops([row]) > 0
