"""The learner in bfloat16, beside float32: the same rollouts teach it the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.data.collate import Batch, collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.papers.ppo import PPO
from rolltap.trainer_client.recipes.papers.tt_opd import TTOPD
from rolltap.trainer_client.settings import load_trainer_settings

from .making import model_folder, random_group, rows_of

ONE = Ranks(0, 1, torch.device("cpu"))
GROUPS = [random_group(f"g{index}", [1.0, 0.0, 0.25, 0.5], seed=index) for index in range(3)]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    yield model_folder(tmp_path / "model")
    ONE.leave()


def learner(
    model: Path, dtype: str, *, spared: bool = False, recipe: Recipe | None = None, lora: dict[str, Any] | None = None
) -> Learner:
    settings = load_trainer_settings(
        key="key", policy="policy", model=model, out=model.parent / "out", optimiser={"lr": 1e-2}, lora=lora or {},
        compute={"device": "cpu", "dtype": dtype, "gradient_checkpointing": spared},
    )  # fmt: skip
    return Learner(model, settings, ONE, recipe)


@pytest.mark.parametrize(
    ("dtype", "widest", "has", "rounds"),
    [("auto", 33, True, False), ("auto", 32, True, True), ("auto", 32, False, False), ("float32", 32, True, False)],
)
def test_a_cpu_computes_wide_models_in_bfloat16_if_it_can(
    model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, widest: int, has: bool, rounds: bool
) -> None:
    monkeypatch.setattr("rolltap.trainer_client.model.learner.WIDE", widest)
    monkeypatch.setattr("rolltap.trainer_client.model.learner._has_bfloat16", lambda: has)
    one = learner(model, dtype)
    assert isinstance(one.network, FSDPModule) == rounds
    assert next(one.model.parameters()).dtype is torch.float32


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


def whole_batch() -> Batch:
    (pack,) = Packer(10_000)(rows_of(GROUPS))
    return collate(pack)


def update(one: Learner, batch: Batch, step: int) -> None:
    predicted = one.predict(batch)
    one.backward(-predicted.logprobs_M.mean() + sum(value.sum() for value in predicted.values.values()))
    one.clip()
    one.apply(step)


@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device", "ignore:Multiple backends are registered")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 4])
def test_a_network_that_follows_the_policy_does_so_after_it_was_read(model: Path, dtype: str, rank: int) -> None:
    """FSDP keeps the outermost weights gathered after a pass without gradient; those that count are the shards.

    Adapters are followed as what they make of the weights.
    """
    one, batch = learner(model, dtype, recipe=TTOPD(decay=0.5, every=1), lora={"rank": rank}), whole_batch()
    start = {name: weight.clone() for name, weight in one.weights().items()}
    one.read("teacher", batch)
    for step in (1, 2):  # the first moves only the adapters' second matrices, from 0
        update(one, batch, step)
    one.update_followers(1)
    followed, policy = one.state()["network teacher"], one.weights()
    assert any((weight - start[name]).abs().max() > 1e-4 for name, weight in policy.items())
    for name, weight in policy.items():
        torch.testing.assert_close(followed[f"model.{name}"], (start[name] + weight) / 2, msg=name)


def test_a_network_that_follows_has_no_place_for_an_adapted_projection(model: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    with pytest.raises(ConfigError, match=r"leave the vocabulary's projection out of lora\.targets"):
        learner(model, "float32", recipe=TTOPD(), lora={"rank": 4, "targets": ("unembedding",)})


def test_what_is_read_between_gradient_and_step_leaves_the_next_pass_the_new_weights(model: Path) -> None:
    """The proximal log-probs of several updates a step are read there."""
    one, batch = learner(model, "bfloat16"), whole_batch()
    predicted = one.predict(batch)
    one.backward(-predicted.logprobs_M.mean())
    one.with_proximal(batch)
    one.apply(1)
    at_once = one.predict(batch).logprobs_M
    one.backward(-at_once.mean())  # now every weight is gathered anew
    one.forget()
    torch.testing.assert_close(at_once, one.predict(batch).logprobs_M)


@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device", "ignore:Multiple backends are registered")
@pytest.mark.parametrize(("before", "after"), [(Recipe, PPO), (PPO, Recipe)])
def test_a_changed_recipe_goes_on_with_the_policys_optimiser_and_its_own_heads(
    model: Path, before: type[Recipe], after: type[Recipe]
) -> None:
    first, batch = learner(model, "float32", recipe=before()), whole_batch()
    update(first, batch, 1)
    with pytest.raises(CheckpointMismatch):
        learner(model, "float32", recipe=after()).restore(first.state())
    second = learner(model, "float32", recipe=after())
    second.restore(first.state(), changed=True)
    moments = [one.optimiser.state[next(one.model.parameters())]["exp_avg"] for one in (first, second)]
    torch.testing.assert_close(moments[1], moments[0])
    assert moments[0].any()
    update(second, batch, 2)
    assert sorted(second.network.heads) == sorted(after.heads)
