"""A rollout's rows are an accident of its branches: one or five of them make the same steps and the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltap.contract.trainer import LeasedGroup
from rolltap.types import Segment

from .making import VOCABULARY, group, model_folder, record, segment
from .plane import Plane, running
from .test_loop import made, trainer, weights

CALLS = 5


def conversation(rng: np.random.Generator) -> list[Segment]:
    """Five calls of one conversation, each in a row of its own: three tokens of context, then four that are trained."""
    ids = rng.integers(0, VOCABULARY, 7 * CALLS).tolist()
    return [segment(ids[: 7 * call + 7], range(7 * call + 3, 7 * call + 7)) for call in range(CALLS)]


def as_one(rows: Sequence[Segment]) -> Segment:
    """The same calls in one row."""
    mask = np.zeros(len(rows[-1]), np.bool_)
    for row in rows:
        mask[: len(row)] |= row.loss_mask
    return segment(rows[-1].token_ids.tolist(), np.flatnonzero(mask).tolist())


def groups(*, split: bool) -> list[LeasedGroup]:
    rng = np.random.default_rng(7)
    made_of = []
    for number in range(2):
        records = []
        for index in range(4):
            rows = conversation(rng)
            records.append(record(f"g{number}", index, rows if split and index % 2 else [as_one(rows)], float(index)))
        made_of.append(group(f"g{number}", records))
    return made_of


def test_one_or_five_rows_a_rollout_make_the_same_steps_and_weights(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    ends, lines = [], []
    for split in (False, True):
        plane = Plane()
        with running(plane) as url:
            settings = made(
                url, model, tmp_path, steps=1, out=tmp_path / f"split-{split}",
                optimiser={"lr": 1e-3, "minibatches": 3, "epochs": 2},
                compute={"device": "cpu", "token_budget": 90},
            )  # fmt: skip
            plane.offer(*groups(split=split))
            trainer(settings).run()
        ends.append(weights(settings.out / "checkpoints" / "step-1"))
        lines.append(json.loads((settings.out / "metrics.jsonl").read_text()))
    assert [line["rows"] for line in lines] == [8, 4 + 4 * CALLS]
    assert [line["updates"] for line in lines] == [6, 6]
    assert lines[0]["trained_tokens"] == lines[1]["trained_tokens"]
    assert lines[0]["grad_norm"] == pytest.approx(lines[1]["grad_norm"], rel=1e-4)
    start = weights(model)
    assert max(float((ends[0][name] - start[name]).abs().max()) for name in start) > 1e-3
    for name in start:
        torch.testing.assert_close(ends[0][name], ends[1][name], atol=3e-5, rtol=0)
