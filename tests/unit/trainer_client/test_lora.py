"""Adapters: only they move, what is pushed computes the same, and a resumed run goes on from them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, MixtralConfig

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.data.collate import Batch, collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.lora import check_pushable, save_adapters
from rolltap.trainer_client.model.network import PolicyNetwork, load_model
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.weights import save_model
from rolltap.trainer_client.settings import LossSettings, TrainerSettings, load_trainer_settings

from .making import config, random_group, rows_of

ONE = Ranks(0, 1, torch.device("cpu"))


def made(model: Path, **lora: Any) -> TrainerSettings:
    return load_trainer_settings(
        key="key", policy="policy", model=model, out=model.parent / "out",
        optimiser={"lr": 1e-2}, compute={"device": "cpu"}, lora={"rank": 4, **lora},
    )  # fmt: skip


@pytest.fixture
def batch() -> Batch:
    (pack,) = Packer(4096, share=True)(rows_of([random_group("g", [1.0, 0.0, 0.5], seed=0)]))
    return collate(pack)


def stepped(learner: Learner, batch: Batch, steps: range) -> Learner:
    for step in steps:
        learner.backward(-learner.predict(batch).logprobs_M.mean())
        learner.apply(step)
    return learner


def test_only_adapters_move_and_the_pushed_weights_compute_the_same(model: Path, batch: Batch, tmp_path: Path) -> None:
    learner = Learner(model, made(model), ONE)
    before = PolicyNetwork(load_model(model, torch.float32))(batch).logprobs_M
    assert torch.equal(learner.predict(batch).logprobs_M, before)
    assert all("lora_" in name for name, one in learner.network.named_parameters() if one.requires_grad)
    after = stepped(learner, batch, range(1, 4)).predict(batch).logprobs_M
    assert (after - before).abs().max() > 1e-2
    save_model(learner.model, learner.weights(), tmp_path / "pushed", model)
    pushed = PolicyNetwork(load_model(tmp_path / "pushed", torch.float32))
    assert not any("lora_" in name for name, _ in pushed.named_parameters())
    torch.testing.assert_close(pushed(batch).logprobs_M, after, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's, of transformers
def test_a_saved_adapter_is_read_by_peft_over_the_model(model: Path, batch: Batch, tmp_path: Path) -> None:
    settings = made(model)
    learner = stepped(Learner(model, settings, ONE), batch, range(1, 4))
    save_adapters(learner.adapters(), settings.lora, model, tmp_path / "adapter")
    base = PolicyNetwork(load_model(model, torch.float32))
    loaded = PeftModel.from_pretrained(load_model(model, torch.float32), tmp_path / "adapter")
    adapted = PolicyNetwork(loaded.merge_and_unload())
    after = learner.predict(batch).logprobs_M
    assert (after - base(batch).logprobs_M).abs().max() > 1e-2
    torch.testing.assert_close(adapted(batch).logprobs_M, after, atol=1e-5, rtol=1e-5)


def test_a_resumed_run_ends_in_the_same_weights(model: Path, batch: Batch) -> None:
    torch.manual_seed(0)  # as `seed` does: adapters begin at random
    straight = stepped(Learner(model, made(model), ONE), batch, range(1, 5)).weights()
    torch.manual_seed(0)
    first = stepped(Learner(model, made(model), ONE), batch, range(1, 3))
    second = Learner(model, made(model), ONE)
    second.restore(first.state())
    resumed = stepped(second, batch, range(3, 5)).weights()
    assert straight.keys() == resumed.keys()
    for name in straight:
        torch.testing.assert_close(resumed[name], straight[name], atol=1e-6, rtol=1e-6)


def test_a_checkpoint_with_other_adapters_is_refused(model: Path, batch: Batch) -> None:
    state = stepped(Learner(model, made(model), ONE), batch, range(1, 2)).state()
    with pytest.raises(CheckpointMismatch, match="adapters"):
        Learner(model, made(model, rank=0), ONE).restore(dict(state))
    with pytest.raises(CheckpointMismatch):
        Learner(model, made(model, rank=8), ONE).restore(state)


def test_an_unknown_layer_is_one_line(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.lora.targets: .*nowhere"):
        Learner(model, made(model, targets=("nowhere",)), ONE)


@pytest.mark.parametrize("target", ["unembedding", "lm_head"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_projection_that_engines_have_no_weights_of_is_refused(target: str, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = config()
    small.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    learner = Learner(tmp_path, made(tmp_path, targets=("q_proj", target)), ONE)
    with pytest.raises(ConfigError, match="projection of this model is its embedding") if tied else nullcontext():
        check_pushable(learner.model, tmp_path)


@pytest.mark.parametrize(
    ("target", "kind"), [("embed_tokens", "Embedding"), ("gate", "MixtralTopKRouter"), ("experts", "MixtralExperts")]
)
def test_a_target_that_is_no_linear_layer_is_refused(target: str, kind: str, tmp_path: Path) -> None:
    mixture(tmp_path)
    with pytest.raises(ConfigError, match=rf"trainer.lora.targets: .*{kind}"):
        Learner(tmp_path, made(tmp_path, targets=("q_proj", target)), ONE)


def test_all_linear_layers_of_a_mixture_are_those_that_the_pushed_weights_hold(batch: Batch, tmp_path: Path) -> None:
    """peft's "all-linear" also wraps experts and router, whose adapters no pushed folder has."""
    mixture(tmp_path)
    learner = stepped(Learner(tmp_path, made(tmp_path), ONE), batch, range(1, 4))
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in learner.adapters()}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj"}
    save_model(learner.model, learner.weights(), tmp_path / "pushed", tmp_path)
    pushed = PolicyNetwork(load_model(tmp_path / "pushed", torch.float32))
    torch.testing.assert_close(pushed(batch).logprobs_M, learner.predict(batch).logprobs_M, atol=1e-5, rtol=1e-5)


def mixture(folder: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, num_local_experts=4, sliding_window=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_the_reference_of_the_divergence_is_the_model_without_adapters(model: Path, batch: Batch) -> None:
    """No second model is loaded."""
    settings = made(model).model_copy(update={"loss": LossSettings(kl=0.1)})  # type: ignore[call-arg]
    learner = stepped(Learner(model, settings, ONE), batch, range(1, 4))
    assert learner.reference is None
    start = PolicyNetwork(load_model(model, torch.float32))(batch).logprobs_M
    found = learner.with_reference(batch).reference_M
    assert found is not None
    torch.testing.assert_close(found, start, rtol=0, atol=1e-6)
    assert (learner.predict(batch).logprobs_M - start).abs().max() > 1e-2
    assert not found.requires_grad
