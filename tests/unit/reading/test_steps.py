"""A trainer's steps are read from its own file, as far as they can be."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rolltap.reading.runs import read_steps
from rolltap.reading.types import TrainerStep

VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())
ROWS = st.dictionaries(st.sampled_from(["step", "loss", "kl", "name"]), VALUES)


def written(path: Path, lines: list[str]) -> list[TrainerStep]:
    path.write_text("\n".join(lines), encoding="utf-8")
    return read_steps(path)


def test_of_a_step_the_last_attempt_counts_and_numbers_are_kept(tmp_path: Path):
    assert read_steps(tmp_path / "metrics.jsonl") == read_steps(None) == []
    rows = [{"step": 2, "loss": 1.0}, {"step": 1, "loss": 3, "name": "x"}, {"step": 2, "loss": 2.0, "kl": float("nan")}]
    steps = written(tmp_path / "metrics.jsonl", [*map(json.dumps, rows), '{"step": 3, "los'])
    assert steps == [TrainerStep(1, {"loss": 3.0}), TrainerStep(2, {"loss": 2.0})]


@given(st.lists(ROWS.map(json.dumps) | st.text(max_size=20) | st.just("[" * 5_000)))
def test_no_file_keeps_a_run_from_being_shown(tmp_path_factory, lines: list[str]):
    steps = written(tmp_path_factory.getbasetemp() / "any.jsonl", lines)
    assert [each.step for each in steps] == sorted({each.step for each in steps})
    json.dumps([each.values for each in steps], allow_nan=False)
