"""Model families beside their own eager attention: packed with a shared trunk and a second row, or refused by name.

The rows are longer than the sliding windows, so a window that is not honoured shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from rolltap.errors import ConfigError
from rolltap.trainer_client.data.collate import Batch, collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.model import architectures
from rolltap.trainer_client.model.network import PolicyNetwork, load_model
from rolltap.trainer_client.recipes import make_recipe
from rolltap.trainer_client.run.planning import Planner
from rolltap.trainer_client.settings import load_trainer_settings

from .making import segment

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {**SMALL, "head_dim": 8}
WINDOW = {"sliding_window": 8}
WIDER = {"sliding_window": 16}
"""Wider than the rows of the try at the start, as windows of real models are: nothing but these rows shows it."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
LINEAR = {**HEADS, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
          "linear_value_head_dim": 8, "num_hidden_layers": 4}  # fmt: skip
IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}  # fmt: skip

PACKED: dict[str, dict[str, Any]] = {
    "Llama": SMALL,
    "Mistral": SMALL | WINDOW,
    "Mixtral": SMALL | WINDOW | {"num_local_experts": 4},
    "Qwen2Moe": SMALL | WIDER | EXPERTS | {"use_sliding_window": True, "max_window_layers": 1},  # in its mask only
    "Phi3": SMALL | WINDOW,
    "Starcoder2": SMALL | WINDOW,
    "Qwen3": HEADS | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "Gemma2": HEADS | WINDOW | {"query_pre_attn_scalar": 8},  # soft-capped scores and logits
    "Gemma3Text": HEADS | WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": HEADS | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},  # attention sinks
    "Olmo3": SMALL | WINDOW,
    "Cohere2": SMALL | WINDOW | {"logit_scale": 0.25},
    "Granite": SMALL | {"logits_scaling": 4.0, "attention_multiplier": 0.3},
}
ALONE: dict[str, dict[str, Any]] = {
    "Qwen3Next": LINEAR | EXPERTS,
    "Qwen3_5Text": LINEAR,
    "Qwen3_5MoeText": LINEAR | EXPERTS,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "differ from the model's own"),
    "StableLm": (SMALL, "don't take a packed batch"),
    "Falcon": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, "attention"),
    "Llama4Text": (HEADS | {"num_local_experts": 2, "intermediate_size_mlp": 48}, "layers of chunked_attention"),
    "Nemotron": (SMALL, "don't take a packed batch"),
    "JetMoe": (SMALL, "don't take a packed batch"),
    "Phimoe": (SMALL | {"num_local_experts": 4}, "routers draw experts at random"),
    "Gemma3": (
        {"text_config": HEADS | {"query_pre_attn_scalar": 8}, "vision_config": IMAGES, "mm_tokens_per_image": 4},
        "save its text model in a folder of its own",
    ),
}


def model_of(family: str, options: dict[str, Any]) -> Any:
    """The family's model with its own attention, its weights far enough from each other to tell positions apart."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * torch.randn_like(weight)
    return model


def rows() -> list[PackedRow]:
    """Two rows with a trunk of 24 tokens, and a third one; every token but the first has loss."""
    torch.manual_seed(0)
    trunk, *rest = (torch.randint(3, 64, (size,)).tolist() for size in (24, 16, 13, 30))
    whole = [trunk + rest[0], trunk + rest[1], rest[2]]
    return [
        PackedRow.uniform(segment(ids, range(1, len(ids))), number, number, 1.0, 1.0)
        for number, ids in enumerate(whole)
    ]


def eager_logprobs(model: Any, batch: Batch) -> Tensor:
    """Of the batch's trained tokens, each row by itself through the model's own attention."""
    by_row = {}
    for row in rows():
        ids = torch.as_tensor(row.token_ids, dtype=torch.long)
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        by_row[row.number] = torch.log_softmax(logits[:-1], -1).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([by_row[number] for number in dict.fromkeys(batch.rollouts_M.tolist())])


@pytest.mark.parametrize(("family", "alone"), [*((name, False) for name in PACKED), *((name, True) for name in ALONE)])
def test_a_family_is_trained_on_its_own_log_probs_and_gradients(family: str, alone: bool, tmp_path: Path) -> None:
    own = model_of(family, (ALONE if alone else PACKED)[family])
    own.save_pretrained(tmp_path)
    policy = PolicyNetwork(load_model(tmp_path, torch.float32).eval())
    assert architectures.rows_alone(policy.model.config) is alone
    packs = Packer(1000, share=True, alone=alone)(rows())
    assert len(packs) == (3 if alone else 1)
    packed = torch.cat([policy(collate(pack)).logprobs_M for pack in packs])
    wanted = torch.cat([eager_logprobs(own, collate(pack)) for pack in packs])
    torch.testing.assert_close(packed.sort().values, wanted.sort().values, atol=1e-4, rtol=1e-4)
    packed.sum().backward()
    wanted.sum().backward()
    gradients = dict(own.named_parameters())
    for name, weight in policy.model.named_parameters():
        if gradients[name].grad is not None:
            torch.testing.assert_close(weight.grad, gradients[name].grad, atol=2e-3, rtol=2e-3, msg=name)


NOISY: dict[str, dict[str, Any]] = {
    "Llama": SMALL | {"attention_dropout": 0.5},
    "Phi3": SMALL | {"resid_pdrop": 0.5, "embd_pdrop": 0.5},
    "Starcoder2": SMALL | {"residual_dropout": 0.5, "embedding_dropout": 0.5},
    "Mixtral": SMALL | {"num_local_experts": 4, "router_jitter_noise": 0.5},
}


@pytest.mark.parametrize("family", NOISY)
def test_a_model_with_dropout_or_router_noise_is_trained_without_it(family: str, tmp_path: Path) -> None:
    """Else log-probs of the weights that sampled a token would differ from the engine's, and ratios begin off 1."""
    own = model_of(family, NOISY[family])
    own.save_pretrained(tmp_path)
    (pack,) = Packer(1000, share=True)(rows())
    policy = PolicyNetwork(load_model(tmp_path, torch.float32).train())
    first, second = (policy(collate(pack)).logprobs_M for _ in range(2))
    assert torch.equal(first, second)
    wanted = eager_logprobs(own, collate(pack))
    torch.testing.assert_close(first.sort().values, wanted.sort().values, atol=1e-4, rtol=1e-4)


def test_noise_that_no_setting_switches_off_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(mlp: Any, hidden: Tensor) -> Tensor:
        return plain(mlp, hidden) + (torch.randn_like(hidden) if mlp.training else 0)

    plain = LlamaMLP.forward
    model_of("Llama", SMALL).save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaMLP, "forward", noisy)
    with pytest.raises(ConfigError, match="differ from the model's own"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4,
         "original_max_position_embeddings": 16},
    ],
)  # fmt: skip
def test_rotary_positions_that_depend_on_another_rows_length_are_refused(rope: dict[str, Any], tmp_path: Path) -> None:
    own = model_of("Llama", SMALL | {"rope_parameters": rope, "max_position_embeddings": 32})
    short = torch.arange(3, 13)[None]
    alone = own(input_ids=short, use_cache=False).logits
    beside = own(
        input_ids=torch.cat([short, short]), position_ids=torch.stack([torch.arange(10), torch.arange(30, 40)])
    )
    assert (beside.logits[0] - alone[0]).abs().max() > 1e-3, "the other row's length moves this one"
    own.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"rotary positions by {rope['rope_type']}"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_would_be_trained_wrongly_is_refused(family: str, tmp_path: Path) -> None:
    options, reason = REFUSED[family]
    model_of(family, options).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load_model(tmp_path, torch.float32)


def test_a_loss_over_whole_rollouts_needs_rows_that_can_be_packed(tmp_path: Path) -> None:
    settings = load_trainer_settings(policy="p", model=tmp_path, out=tmp_path, key="k", loss={"ratio": "sequence"})
    with pytest.raises(ConfigError, match="each row alone"):
        Planner(make_recipe("grpo", {}), settings).packer(1, alone=True)
