"""The GPU benchmark runs to its table on a machine without one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltap.types import NO_VERSION, Segment

from ...bench.bench_trainer_gpu import CPU, Shape, Step, main, measure, rollouts_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is a benchmark of ten minutes")
@pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and TRL about themselves
def test_without_a_gpu_it_compares_a_tiny_model(tmp_path: Path) -> None:
    main(["--minutes", "0.01", "--report", str(tmp_path / "report.json")])
    found = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [(one["model"], one["trainer"]) for one in found] == [("tiny", "rolltap"), ("tiny", "trl")]
    assert all(one["tokens_per_s"] > 0 and one["steps"] >= 1 and not one["failure"] for one in found)


def test_what_does_not_fit_is_measured_with_checkpointing_and_what_fails_says_why() -> None:
    def fits(checkpointing: bool) -> Step:
        if not checkpointing:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return lambda: None

    def never_fits(checkpointing: bool) -> Step:
        raise torch.OutOfMemoryError("tried to allocate too much")

    def fails(checkpointing: bool) -> Step:
        raise TypeError("no such thing")

    rows = rollouts_of(CPU[0])
    found = [measure(CPU[0], "name", make, rows, 0.0) for make in (fits, never_fits, fails)]
    assert [one.checkpointing for one in found] == [True, True, False]
    assert [one.failure for one in found] == [
        "", "out of memory: tried to allocate too much", "TypeError: no such thing",
    ]  # fmt: skip
    assert [one.steps for one in found] == [1, 0, 0]


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
