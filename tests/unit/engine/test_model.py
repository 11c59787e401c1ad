"""The network is transformers' own: in slots, in pieces, beside others, it computes what it computes alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolltap.engine.model import CausalModel
from rolltap.engine.sampling import ActiveRequest, SamplingOptions, SamplingRequest
from rolltap.engine.scheduler import EngineLoop, EngineSlots
from rolltap.errors import ConfigError

from ..trainer_client.test_architectures import PACKED, SMALL, model_of

FAMILIES: dict[str, dict[str, Any]] = {
    **PACKED,
    "Qwen2": SMALL,
    "SmolLM3": SMALL,
    "Gemma": SMALL | {"head_dim": 8},
    "GPT2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "GPTNeoX": SMALL,
    "Qwen3, tied": SMALL | {"head_dim": 8, "tie_word_embeddings": True},
}
CONTEXT = 250


def family_folder(name: str, folder: Path) -> Any:
    """Writes a small random model of that family, far from any symmetry; the model with its own attention."""
    family, _, _ = name.partition(",")
    own = model_of(family, FAMILIES[name] | {"max_position_embeddings": 300})
    own.save_pretrained(folder)
    return own


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


def active(slot: int, length: int) -> ActiveRequest:
    request = SamplingRequest(str(slot), [], SamplingOptions(1), lambda _: None)
    return ActiveRequest(request, slot, length, cached=0, reused=0, rng=random.Random(0))


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_in_slots_get_the_logits_of_the_whole_sequence(name: str, tmp_path: Path) -> None:
    """Two requests of different lengths in unequal pieces, over a growth of the cache and longer than every
    window. A third takes the slot of the first, with its prefix.
    """
    own = family_folder(name, tmp_path)
    model = CausalModel.load(tmp_path)
    torch.manual_seed(2)
    rows = [torch.randint(3, 64, (size,)).tolist() for size in (CONTEXT - 10, 30)]
    rows.append([*rows[0][:100], *torch.randint(3, 64, (20,)).tolist()])
    slots = EngineSlots(model, 3, CONTEXT)

    def run(ids: list[int], request: ActiveRequest, pieces: list[int], beside: list[ActiveRequest]) -> None:
        for piece in pieces:
            slots.prefill([request, *beside], [piece, *[min(3, other.pending - 1) for other in beside]])
            request.cached += piece
            for other in beside:
                other.cached += min(3, other.pending - 1)
        request.cached = len(ids) - 1

    with torch.inference_mode():
        requests = []
        for ids in rows[:2]:
            slot, shared = slots.take(ids, 5, [request.slot for request in requests])
            assert shared == 0
            requests.append(active(slot, len(ids)))
        run(rows[0], requests[0], [100, 130, 9], [requests[1]])
        requests[1].cached = 9
        run(rows[1], requests[1], [20], [])
        logits, _ = slots.next_logits(requests)
        for row, ids in enumerate(rows[:2]):
            torch.testing.assert_close(logits[row], whole(own, ids)[-1], atol=2e-4, rtol=2e-4)
        slots.release(requests[0].slot, requests[0].length)
        slot, shared = slots.take(rows[2], 5, [requests[1].slot])
        assert (slot, shared) == (requests[0].slot, 100)
        third = active(slot, len(rows[2]))
        third.cached = shared
        run(rows[2], third, [19], [])
        logits, _ = slots.next_logits([third])
        torch.testing.assert_close(logits[0], whole(own, rows[2])[-1], atol=2e-4, rtol=2e-4)
        scored = torch.cat(list(model.score(rows[0])))
        torch.testing.assert_close(scored, whole(own, rows[0]), atol=2e-4, rtol=2e-4)


def whole(own: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return own(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_replaced_by_their_names_in_files(name: str, tmp_path: Path) -> None:
    """Also experts, which the network holds in one tensor and the file each by itself."""
    own = family_folder(name, tmp_path)
    model = CausalModel.load(tmp_path)
    state = {key: tensor * 1.5 for key, tensor in load_file(tmp_path / "model.safetensors").items()}
    for key, tensor in state.items():
        model.check_weight(key, tensor.shape, "the transfer")
    model.replace_weights(state, "the transfer")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = type(own).from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = list(range(3, 40))
    with torch.inference_mode():
        got = torch.cat(list(model.score(ids)))
    torch.testing.assert_close(got, whole(again, ids), atol=2e-4, rtol=2e-4)


def test_a_copy_of_a_tied_weight_is_taken_only_if_it_is_equal(tmp_path: Path) -> None:
    """A trainer that trained the output layer by itself would else be served with another one, without a word."""
    family_folder("Qwen3, tied", tmp_path)
    model = CausalModel.load(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    copied = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    model.check_weight("lm_head.weight", copied["lm_head.weight"].shape, "the transfer")
    model.replace_weights(copied, "the transfer")
    copied["lm_head.weight"] += 1
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        model.replace_weights(copied, "the transfer")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "model.norm.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "extra"),
        (lambda state: state.update({"lm_head.weight": torch.zeros(3, 3)}), "shape of lm_head.weight"),
        (lambda state: state["model.norm.weight"].fill_(float("nan")), "model.norm.weight holds"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    model: CausalModel, tmp_path: Path, damage: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    before = [parameter.clone() for parameter in model.network.parameters()]
    state = {name: torch.zeros_like(tensor) for name, tensor in model.network.state_dict().items()}
    damage(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        model.load_weights(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(before, model.network.parameters(), strict=True))


def test_a_folder_with_weights_that_are_no_numbers_is_refused(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    state = load_file(model_folder / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight holds values that are not finite"):
        CausalModel.load(tmp_path)


@pytest.mark.parametrize("drop", ["model.norm.weight", "model.layers.1.mlp.down_proj.weight"])
def test_a_folder_without_all_weights_is_refused(model_folder: Path, tmp_path: Path, drop: str) -> None:
    """transformers would fill them with random numbers and a warning."""
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    state = load_file(model_folder / "model.safetensors")
    del state[drop]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=drop):
        CausalModel.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "t5"}, "no causal language model"),
        ({"model_type": "mamba"}, "vLLM or SGLang|no keys"),
        ({"model_type": "qwen3_next"}, "linear_attention"),
        ({"model_type": "nonsense"}, "not a readable model configuration"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type dynamic"),
        ({"vocab_size": 900}, "tensors don't match|size"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(
    model_folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    raw = json.loads((model_folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=message):
        CausalModel.load(tmp_path)


def test_without_a_longest_sequence_the_context_must_be_said(model: CausalModel) -> None:
    model.longest = 0
    with pytest.raises(ConfigError, match="set --context"):
        EngineLoop(model, frozenset(), lambda _: None, 1)
    assert EngineLoop(model, frozenset(), lambda _: None, 1, 100).context == 100


@pytest.mark.parametrize("content", [None, b"not safetensors"])
def test_missing_or_corrupt_weights_are_named(model: CausalModel, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="safetensors"):
        model.load_weights(tmp_path)


@pytest.mark.parametrize("normed", [False, True])
def test_a_mixture_says_which_experts_it_took(tmp_path: Path, normed: bool) -> None:
    theirs = mixture_folder(tmp_path, normed=normed)
    model = CausalModel.load(tmp_path)
    choices: list[Tensor] = []
    for layer in theirs.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: choices.append(output[2]))
    rows = [list(range(3, 3 + size)) for size in (12, 30)]
    slots = EngineSlots(model, 4, 50)
    requests = []
    with torch.inference_mode():
        for ids in rows:
            slot, _ = slots.take(ids, 5, [request.slot for request in requests])
            requests.append(active(slot, len(ids)))
            slots.prefill(requests[-1:], [len(ids) - 1])
            requests[-1].cached = len(ids) - 1
        _, experts = slots.next_logits(requests)
    assert experts is not None
    for ids, taken in zip(rows, experts, strict=True):
        choices.clear()
        whole(theirs, ids)
        assert torch.equal(taken, torch.stack([choice[-1] for choice in choices]))
    folder = tmp_path / "saved"
    model.save(folder)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(whole(again, rows[0]), whole(theirs, rows[0]), atol=1e-5, rtol=1e-5)
