"""The network is Hugging Face's Qwen3, with and without a cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolltap.engine.model import CachePlan, KeyValueCache, ModelConfig, Qwen3
from rolltap.engine.tiny.make import initialise
from rolltap.errors import ConfigError


def mixture_folder(folder: Path, *, normed: bool, vocabulary: int = 64) -> Any:
    """Writes a random Qwen3-MoE of four experts, two a token, as Hugging Face does; that model."""
    torch.manual_seed(3)
    config: Any = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=normed,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    config.head_dim = 8
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_log_probs_equal_hugging_faces(model: Qwen3, tmp_path: Path, tied: bool) -> None:
    ours = initialise(replace(model.config, tie_word_embeddings=tied), seed=3)
    ours.config.save(tmp_path)
    ours.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, ours.config.vocab_size, (3, 150))
    with torch.no_grad():
        difference = ours(ids).log_softmax(-1) - theirs(ids).logits.log_softmax(-1)
    assert difference.abs().max() < 1e-5


def test_a_folder_saved_by_hugging_face_loads(model: Qwen3, model_folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).save_pretrained(tmp_path)
    again = Qwen3.load(tmp_path)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_extending_a_cache_gives_what_whole_sequences_give(model: Qwen3) -> None:
    """Two rows of different lengths, in pieces of different lengths, over a growth of the cache."""
    lengths, pieces = (300, 260), ((250, 100), (49, 159), (1, 1))
    ids = torch.randint(0, model.config.vocab_size, (2, 300))
    cache = KeyValueCache(model.config, slots=4, length=400)
    rows = torch.tensor([[2], [0]])
    starts = torch.zeros(2, 1, dtype=torch.long)
    outputs: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for piece in pieces:
            counts = torch.tensor(piece)[:, None]
            steps = torch.arange(max(piece))[None]
            positions = torch.where(steps < counts, starts + steps, 0)
            cache.grow(int(positions.max()) + 1)
            columns = torch.where(steps < counts, starts + steps, cache.bin)
            plan = CachePlan(cache, rows, rows[:, 0], positions, columns, int(positions.max()) + 1)
            hidden = model.hidden(torch.gather(ids, 1, positions), plan)
            for row, count in enumerate(piece):
                outputs[row].append(hidden[row, :count])
            starts += counts
        for row, length in enumerate(lengths):
            whole = model.hidden(ids[row : row + 1, :length])[0]
            assert (torch.cat(outputs[row]) - whole).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "model.norm.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "extra"),
        (lambda state: state.update({"lm_head.weight": torch.zeros(3, 3)}), "shape of lm_head.weight"),
        (lambda state: state["model.norm.weight"].fill_(float("nan")), "model.norm.weight holds"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(model: Qwen3, tmp_path: Path, damage, message: str) -> None:
    from safetensors.torch import save_file

    before = [parameter.clone() for parameter in model.parameters()]
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        model.load_weights(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_model_of_another_kind_is_refused(model_folder: Path, tmp_path: Path, change: dict, message: str) -> None:
    raw = json.loads((model_folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    with pytest.raises(ConfigError, match=message):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_missing_or_corrupt_weights_are_named(model: Qwen3, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="safetensors"):
        model.load_weights(tmp_path)


@pytest.mark.parametrize("normed", [False, True])
def test_a_mixture_equals_hugging_faces_and_says_which_experts_it_took(tmp_path: Path, normed: bool) -> None:
    theirs = mixture_folder(tmp_path, normed=normed)
    ours = Qwen3.load(tmp_path)
    ids = torch.randint(0, ours.config.vocab_size, (3, 50))
    choices: list[torch.Tensor] = []
    for layer in theirs.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: choices.append(output[2].view(3, 50, -1)))
    with torch.no_grad():
        difference = ours(ids).log_softmax(-1) - theirs(ids).logits.log_softmax(-1)
    assert difference.abs().max() < 1e-5
    experts = ours.experts()
    assert experts is not None
    assert torch.equal(experts, torch.stack(choices, dim=2))
    assert Qwen3(ours.config).state_dict().keys() == ours.state_dict().keys()
    ours.config.save(tmp_path)
    ours.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert (again(ids).logits - theirs(ids).logits).abs().max() < 1e-5


def test_a_mixture_with_dense_layers_is_refused(tmp_path: Path) -> None:
    mixture_folder(tmp_path, normed=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "mlp_only_layers": [0]}))
    with pytest.raises(ConfigError, match="mlp_only_layers"):
        Qwen3.load(tmp_path)
