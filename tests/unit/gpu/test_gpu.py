"""`make gpu` runs to its end on a machine without a card, and what fails there is told."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.types import NO_VERSION, Segment

from ...gpu.run import SHARES, STEPS, main, run_all, run_step
from ...gpu.shapes import WITHOUT_A_CARD, Rollouts, Shape
from ...gpu.update import Measured, Step

CPU = torch.device("cpu")
without_a_card = pytest.mark.skipif(torch.cuda.is_available(), reason="there it is a benchmark of eight minutes")


def rows(name: str, tmp_path: Path) -> list[dict[str, Any]]:
    run_step(STEPS[name], 60.0, tmp_path / f"{name}.json")
    report = json.loads((tmp_path / f"{name}.json").read_text())
    assert report["complete"]
    return report["rows"]


@without_a_card
@pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and TRL about themselves
def test_ours_and_trl_are_measured_with_all_weights_and_with_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's import alone takes some 8 CPU seconds."""
    monkeypatch.setattr("tests.gpu.update.timed", once)
    found = rows("update", tmp_path)
    assert [one["trainer"] for one in found] == ["rolltap", "trl", "rolltap, LoRA 4", "trl, LoRA 4"]
    assert [one["failure"] for one in found] == [""] * 4
    assert all(one["tokens_per_s"] > 0 and one["steps"] == 1 for one in found)
    assert {one["tokens"] for one in found} == {found[1]["computed"]}
    assert found[0]["computed"] == found[2]["computed"] < 0.8 * found[1]["computed"]  # shared trunks


def once(step: Step, device: torch.device, seconds: float) -> tuple[float, int]:
    step()
    return 1.0, 1


@without_a_card
def test_engine_and_trainer_agree_in_float32_and_nearly_in_bfloat16(tmp_path: Path) -> None:
    exact, rounded = rows("agreement", tmp_path)
    assert (exact["engine"], rounded["engine"]) == ("float32", "bfloat16")
    assert exact["differences"]["1.0"] < 1e-4 < rounded["differences"]["1.0"] < 0.2
    assert exact["entropy"] == pytest.approx(rounded["entropy"], abs=0.1)
    for one in (exact, rounded):
        assert one["mean_ratio"] == pytest.approx(1.0, abs=0.01)
        assert all(effect["cosine"] > 0.999 for effect in one["effects"].values())
        assert one["effects"]["truncated, cap 1"]["weight"] <= 1.0


@pytest.mark.acceptance
@without_a_card
def test_the_served_engine_takes_pushes_in_the_middle_of_a_call(tmp_path: Path) -> None:
    """Some 12 CPU seconds: an engine, a proxy, and a process that sends weights start."""
    found = rows("serving", tmp_path)
    assert [one["at_once"] for one in found if one["what"] == "rate"] == list(WITHOUT_A_CARD.at_once)
    pushes = [one for one in found if one["what"] == "push"]
    assert [one["way"] for one in pushes] == ["folder", "process group, its first", "process group"]
    assert all(one["before"] > 0 and one["after"] > 0 for one in pushes)


@without_a_card
@pytest.mark.acceptance
def test_the_demo_runs_and_pushes(tmp_path: Path) -> None:
    """Some 20 CPU seconds: an engine, a proxy and a trainer start, and agents run."""
    (found,) = rows("demo", tmp_path)
    assert found["weight_versions"] >= 1
    assert found["kept_tokens"] > 0


def test_the_run_ends_in_time_whatever_a_step_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that dies, one that hangs and one that does its work: what was measured before stays."""

    def python(text: str) -> list[str]:
        return [sys.executable, "-c", text]

    row = {"model": "tiny", "tokens_per_s": 1234.5678, "mfu": None, "steps": 3, "effects": {"cap": 1}}
    (tmp_path / "dies.json").write_text(json.dumps({"rows": [row]}))
    failures = run_all(
        {
            "dies": python("import sys; print('out of memory'); sys.exit(3)"),
            "hangs": python("import time; time.sleep(600)"),
            "works": python("import sys; assert 0 < float(sys.argv[1]) < 5"),
        },
        6.0,
        tmp_path,
    )
    assert failures.keys() == {"dies", "hangs"}
    assert failures["dies"] == "ended with status 3"
    report = json.loads((tmp_path / "dies.json").read_text())
    assert (report["rows"], report["log"], report["complete"]) == ([row], ["out of memory"], False)
    assert "took over" in json.loads((tmp_path / "hangs.json").read_text())["failure"]
    assert capsys.readouterr().out.startswith(
        "dies: ended with status 3\n  model tiny, tokens_per_s 1235, steps 3\nhangs: took over"
    )


def test_rows_are_written_as_they_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "step.json"

    def measure(seconds: float, folder: Path) -> Iterator[Mapping[str, Any]]:
        yield {"first": 1}
        assert json.loads(path.read_text())["rows"] == [{"first": 1}]
        raise RuntimeError("the card fell out")

    with pytest.raises(RuntimeError):
        run_step(measure, 1.0, path)
    report = json.loads(path.read_text())
    assert (report["rows"], report["complete"]) == ([{"first": 1}], False)


def test_every_step_has_a_share_of_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert SHARES.keys() == STEPS.keys()
    assert sum(SHARES.values()) == pytest.approx(1.0)
    with pytest.raises(SystemExit):
        main(["--steps", "no-such-step"])
    assert "no-such-step" in capsys.readouterr().err


def test_what_does_not_fit_is_measured_with_checkpointing_and_what_fails_says_why() -> None:
    def fits(checkpointing: bool) -> Step:
        if not checkpointing:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return lambda: None

    def never_fits(checkpointing: bool) -> Step:
        raise torch.OutOfMemoryError("tried to allocate too much")

    def fails(checkpointing: bool) -> Step:
        raise TypeError("no such thing")

    found = [Measured("m", "t", make, 1.0, 1, 1, 1.0).result(CPU, 0.0) for make in (fits, never_fits, fails)]
    assert [one.checkpointing for one in found] == [True, True, False]
    assert [one.failure for one in found] == [
        "", "out of memory: tried to allocate too much", "TypeError: no such thing",
    ]  # fmt: skip
    assert [one.steps for one in found] == [1, 0, 0]


HAND = Shape("hand", 2, 1, 1, 1, 2, 3, 5, 64)
"""One layer of width 2 with one head of 2, inner 3, vocabulary 5."""


def row(length: int, trained: int) -> PackedRow:
    mask = np.arange(length) >= length - trained
    segment = Segment(
        np.zeros(length, np.int32),
        mask,
        np.zeros(length, np.float32),
        np.where(mask, 0, NO_VERSION).astype(np.int32),
        (),
    )
    return PackedRow.uniform(segment, 0)


def test_flops_are_counted_by_hand() -> None:
    packs = Packer(64, alone=True)([row(4, 1)])
    weights = 2 * 2 * 4 + 3 * 2 * 3
    pairs = 4 + 3 + 2 + 1
    assert HAND.flops(packs) == 6 * weights * 4 + 6 * 2 * 5 * 1 + 12 * 2 * pairs
    assert HAND.flops(packs, adapters=True) == 4 * weights * 4 + 4 * 2 * 5 * 1 + 12 * 2 * pairs


def test_flops_of_a_shared_trunk_are_counted_once() -> None:
    one, twin = row(20, 1), row(20, 1)
    assert HAND.flops(Packer(64, share=True)([one, twin])) == HAND.flops(Packer(64, alone=True)([one]))
    assert HAND.flops(Packer(64, alone=True)([one, twin])) == 2 * HAND.flops(Packer(64, alone=True)([one]))


def test_rollouts_are_of_agents() -> None:
    """A shared prompt, turns with the tools' replies unmasked, and a branch of every fourth rollout."""
    shape = Rollouts(groups=2, each=4, prompt=40, turns=4, sampled=12, read=12)
    rollouts = shape.segments(512)
    assert [len(segments) for segments in rollouts] == [1, 1, 1, 2] * 2
    starts = {segments[0].token_ids[:40].tobytes() for segments in rollouts}
    assert len(starts) == 2
    stem, branch = rollouts[3]
    same = int((stem.token_ids[: len(branch)] != branch.token_ids[: len(stem)]).argmax())
    assert 40 < same < len(stem)
    for segments in rollouts:
        for segment in segments:
            turns = np.flatnonzero(np.diff(segment.loss_mask.astype(int)) == 1)
            assert len(turns) == 4
            assert segment.loss_mask[-1]
            assert not segment.loss_mask[:40].any()
