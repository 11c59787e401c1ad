"""What NeMo RL's adapter has beside the contract: its mean over sequences, and the rows that fill a step up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rolltap.trainer_client.recipes import make_recipe

from ..unit.trainer_client.plane import Plane
from .driver import Run
from .gradient import our_gradient
from .nemo_rl_policy import ROWS, NemoRl, SchemaLoss
from .proofs import HERE, SOURCES
from .world import groups

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers about itself


def rows() -> list[Any]:
    from rolltap.trainer_client.adapters.rows import rows_of

    return list(rows_of(groups(2), make_recipe("dr_grpo", {})))


@pytest.mark.parametrize(("kind", "whole"), [("TOKEN_LEVEL", 12), ("SEQUENCE_LEVEL", 6)])
def test_the_rows_of_a_rollout_weigh_as_one_sequence(kind: str, whole: int) -> None:
    """Six rollouts of twelve rows are trained."""
    from types import SimpleNamespace

    from rolltap.trainer_client.adapters.nemo_rl_policy import batch_of

    batch = batch_of(rows(), SchemaLoss(loss_type=SimpleNamespace(name=kind)), 0, multiple=ROWS + 1)
    assert float(batch["sample_mask"].sum()) == pytest.approx(whole)
    assert batch["sample_mask"][-3:].tolist() == [0.0, 0.0, 0.0]
    assert len(batch["input_ids"]) == 15


if HERE == SOURCES:

    def test_with_its_mean_over_sequences_a_rollout_weighs_once(plane: Plane, run: Run) -> None:
        driver = NemoRl(by_sequence=True)
        plane.offer(*groups(2))
        theirs = driver.run(run).gradient
        for name, gradient in our_gradient(driver, run.model, groups(2)).items():
            torch.testing.assert_close(theirs[name], gradient, atol=1e-5, rtol=1e-4)
