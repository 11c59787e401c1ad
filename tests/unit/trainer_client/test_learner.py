"""The learner in bfloat16, beside float32: the same rollouts teach it the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from rolltap.trainer_client.collate import collate
from rolltap.trainer_client.learner import Learner
from rolltap.trainer_client.loss import PolicyLoss
from rolltap.trainer_client.packing import Packer
from rolltap.trainer_client.ranks import Ranks
from rolltap.trainer_client.settings import load_trainer_settings

from .making import model_folder, random_group, rows_of

ONE = Ranks(0, 1, torch.device("cpu"))
GROUPS = [random_group(f"g{index}", [1.0, 0.0, 0.25, 0.5], seed=index) for index in range(3)]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    yield model_folder(tmp_path / "model")
    ONE.leave()


def learner(model: Path, dtype: str, *, spared: bool = False) -> Learner:
    settings = load_trainer_settings(
        key="key", policy="policy", model=model, out=model.parent / "out", optimiser={"lr": 1e-2},
        compute={"device": "cpu", "dtype": dtype, "gradient_checkpointing": spared},
    )  # fmt: skip
    return Learner(model, settings, ONE)


def gradient(one: Learner, budget: int) -> tuple[float, torch.Tensor]:
    """The step's loss and its gradient in passes of at most `budget` tokens."""
    loss, total = PolicyLoss(), 0.0
    for pack in Packer(budget, share=True)(rows_of(GROUPS)):
        batch = collate(pack)
        terms = loss(one.predict(batch), batch)
        one.backward(terms.loss)
        total += float(terms.loss.detach())
    return total, torch.cat([_whole(weight.grad).flatten() for weight in one.network.parameters()])


def _whole(grad: torch.Tensor | None) -> torch.Tensor:
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


def test_bfloat16_has_the_gradient_of_float32_within_its_rounding(model: Path) -> None:
    (exact, wanted), (loss, found) = (gradient(learner(model, dtype), 10_000) for dtype in ("float32", "bfloat16"))
    assert loss == pytest.approx(exact, abs=0.01)
    assert found.dtype is torch.float32
    assert torch.cosine_similarity(found, wanted, dim=0) > 0.99
    assert not torch.equal(found, wanted), "it was computed in float32"


def test_bfloat16_trains_as_float32_does(model: Path) -> None:
    losses: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for dtype, found in losses.items():
        one = learner(model, dtype)
        for step in range(1, 7):
            found.append(gradient(one, 10_000)[0])
            one.clip()
            one.apply(step)
    assert losses["float32"][-1] < losses["float32"][0] - 0.05
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.02)


def test_in_bfloat16_checkpointing_and_accumulation_change_no_gradient(model: Path) -> None:
    _, wanted = gradient(learner(model, "bfloat16"), 10_000)
    _, spared = gradient(learner(model, "bfloat16", spared=True), 10_000)
    torch.testing.assert_close(spared, wanted, atol=1e-6, rtol=1e-5)
    _, in_parts = gradient(learner(model, "bfloat16", spared=True), 60)
    assert torch.cosine_similarity(in_parts, wanted, dim=0) > 0.999
