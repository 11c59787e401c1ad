"""What TRL's adapters have beside the contract: other losses, gradient accumulation, settings they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.trainer.grpo_config import GRPOConfig

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.adapters.trl_grpo import check_arguments
from rolltap.trainer_client.adapters.trl_hooks import LeasedTrainer

from ..unit.trainer_client.plane import Plane
from .driver import Driver, Run
from .gradient import our_gradient
from .trl_async import TrlAsync
from .trl_grpo import TrlGrpo
from .world import groups

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, accelerate and TRL about themselves


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(TrlGrpo("grpo", "rollout"), marks=pytest.mark.long),
        pytest.param(TrlGrpo("dr_grpo", "constant", passes=5), marks=pytest.mark.long),
        TrlGrpo("grpo", "rollout", passes=5),
        pytest.param(TrlAsync(passes=5), marks=pytest.mark.long),
        TrlAsync(passes=14),
    ],
    ids=["grpo", "dr_grpo in 5 passes", "grpo in 5 passes", "async in 5 passes", "async in 14 passes"],
)
def test_in_any_loss_and_any_passes_rollouts_weigh_once(trainer: Driver, plane: Plane, run: Run) -> None:
    """12 rows: where they don't fill the passes, rows without effect do."""
    plane.offer(*groups(2))
    theirs = trainer.run(run).gradient
    for name, gradient in our_gradient(trainer, run.model, groups(2)).items():
        torch.testing.assert_close(theirs[name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("setting", [{"beta": 0.1}, {"num_iterations": 2}, {"importance_sampling_level": "sequence"}])
def test_settings_that_would_train_something_else_are_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        check_arguments(GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **setting))


@pytest.mark.parametrize("start", [False, "checkpoint-1"])
def test_a_start_before_other_checkpoints_is_refused_and_leases_nothing(
    start: bool | str, plane: Plane, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its own checkpoints, it would go on from theirs: groups that they have would be trained again."""
    plane.offer(*groups(4))
    TrlGrpo().run(replace(run, steps=2))
    before, train = len(plane.calls), LeasedTrainer.train
    monkeypatch.setattr(LeasedTrainer, "train", lambda self: train(self, start and str(run.out / str(start))))
    with pytest.raises(ConfigError, match=r"first move these out of .*: .*checkpoint-2"):
        TrlGrpo().run(run)
    assert plane.calls[before:] == []


def test_a_mistyped_checkpoint_is_named_and_nothing_leased(
    plane: Plane, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane.offer(*groups(2))
    train = LeasedTrainer.train
    monkeypatch.setattr(LeasedTrainer, "train", lambda self: train(self, str(run.out / "chekpoint-1")))
    with pytest.raises(CheckpointMismatch, match="chekpoint-1 is not a complete checkpoint"):
        TrlGrpo().run(run)
    assert plane.calls == []
