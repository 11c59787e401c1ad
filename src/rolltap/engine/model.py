"""Qwen3 and Qwen3-MoE in torch, float32: the network that the embedded engine samples from.

Parameter names, `config.json` and `model.safetensors` are Hugging Face's, so a folder written
here loads there and the reverse; log-probs agree to 1e-5. One forward serves training (no cache) and sampling
(with `KeyValueCache`, any mix of prompts and single tokens).

Shapes: `B` rows, `T` new tokens a row, `S` cached slots, `C` cached columns, `H` heads, `K` key-value heads,
`G = H / K` query heads a key-value head, `D` head width, `V` vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from rolltap.errors import ConfigError

ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe"}
"""What is served, with Hugging Face's name of its family: a dense network and a mixture of experts."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The fields of Hugging Face's `Qwen3Config` that shape the network, and of `Qwen3MoeConfig` for a mixture."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Reads `folder/config.json`; `ConfigError` for a model that this network can't be."""
        path = folder / "config.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: not a readable model configuration ({error})") from error
        if not ARCHITECTURES.keys() & set(raw.get("architectures") or ()):
            served = " and ".join(ARCHITECTURES)
            raise ConfigError(f"{path}: architectures is {raw.get('architectures')}; this engine serves {served}")
        raw.setdefault("num_experts", raw.get("num_local_experts", 0))
        rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta", cls.rope_theta)}
        unsupported = {
            "attention_bias": bool(raw.get("attention_bias")),
            "use_sliding_window": bool(raw.get("use_sliding_window")),
            "rope_scaling": bool(raw.get("rope_scaling")) or rope.get("rope_type", "default") != "default",
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
            "mlp_only_layers": bool(raw.get("mlp_only_layers")),
            "decoder_sparse_step": raw.get("decoder_sparse_step", 1) != 1,
        }
        for name, present in unsupported.items():
            if present:
                raise ConfigError(f"{path}: {name} = {raw.get(name)!r} is not supported by this engine")
        try:
            values = {name: raw[name] for name in cls.__slots__ if name in raw}
            return cls(**{**values, "rope_theta": float(rope["rope_theta"])})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{path}: a field is missing ({error})") from error

    def save(self, folder: Path, **extra: Any) -> None:
        """Writes `folder/config.json` with what transformers and vLLM also need; `extra` adds token ids."""
        architecture = list(ARCHITECTURES)[bool(self.num_experts)]
        shape = asdict(self)
        raw = {
            "architectures": [architecture],
            "model_type": ARCHITECTURES[architecture],
            **{name: shape[name] for name in shape if self.num_experts or name not in MIXTURE_FIELDS},
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "use_sliding_window": False,
            "torch_dtype": "float32",
            **extra,
        }
        (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


MIXTURE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")


class KeyValueCache:
    """Keys and values of `slots` sequences of at most `length` tokens.

    A slot's columns `[0, n)` hold its first n tokens. One column more than `length` takes the writes of padding, and
    is never attended to. Columns are added by doubling as sequences grow.
    """

    def __init__(self, config: ModelConfig, slots: int, length: int) -> None:
        self.length = length
        self._shape = (slots, config.num_key_value_heads, config.head_dim)
        self._layers = config.num_hidden_layers
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.bin = -1
        self.grow(min(length, 256))

    def grow(self, columns: int) -> None:
        """Makes room for `columns` tokens a slot; what is cached stays."""
        if columns <= self.bin:
            return
        columns = min(self.length, max(columns, 2 * self.bin))
        slots, heads, width = self._shape
        filled, self.bin = max(self.bin, 0), columns
        for name in ("keys", "values"):
            grown = [torch.zeros(slots, columns + 1, heads, width) for _ in range(self._layers)]
            for new, old in zip(grown, getattr(self, name), strict=False):
                new[:, :filled] = old[:, :filled]
            setattr(self, name, grown)


@dataclass(frozen=True, slots=True, eq=False)
class CachePlan:
    """Where the new tokens of a forward go in the cache.

    `rows` [B] are slots (a slice where they are contiguous); `positions` [B,T] are the tokens' places in their
    sequences; `columns` [B,T] the cache columns written (`cache.bin` for padding); `width` the columns attended to.
    """

    cache: KeyValueCache
    rows: Tensor
    view: slice | Tensor
    positions: Tensor
    columns: Tensor
    width: int


class Attention(nn.Module):
    """Grouped-query attention with RMS-normed queries and keys, and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, hidden, bias=False)
        self.q_norm = nn.RMSNorm(self.width, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.width, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, plan: CachePlan | None, layer: int) -> Tensor:
        b, t, _ = x.shape
        q_BTHD = rope.turn(self.q_norm(self.q_proj(x).view(b, t, self.heads, self.width)))
        k_BTKD = rope.turn(self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.width)))
        v_BTKD = self.v_proj(x).view(b, t, self.kv_heads, self.width)
        if plan is not None:
            keys, values = plan.cache.keys[layer], plan.cache.values[layer]
            keys[plan.rows, plan.columns] = k_BTKD
            values[plan.rows, plan.columns] = v_BTKD
            k_BTKD, v_BTKD = keys[plan.view, : plan.width], values[plan.view, : plan.width]
        out = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BTKD.transpose(1, 2),
            v_BTKD.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def feed_forward(config: ModelConfig) -> nn.Module:
    """A layer's: one, or a mixture of experts."""
    if not config.num_experts:
        return FeedForward(config.hidden_size, config.intermediate_size)
    return ExpertBlock(
        config.hidden_size,
        config.num_experts,
        config.num_experts_per_tok,
        lambda: FeedForward(config.hidden_size, config.moe_intermediate_size),
        normed=config.norm_topk_prob,
    )


class Layer(nn.Module):
    """Attention and feed-forward, each normed before and added after."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.self_attn = Attention(config)
        self.mlp = feed_forward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, mask: Tensor | None, plan: CachePlan | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, plan, self.index)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Cosines and sines of the new tokens' positions, [B or 1,T,1,D]."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotates `x` [B,T,heads,D] by halves, as Hugging Face's `apply_rotary_pos_emb`."""
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-high, low), dim=-1) * self.sin


class Body(nn.Module):
    """Everything below the output head; its name in the weights is `model`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class Qwen3(nn.Module):
    """The causal language model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._cos, self._sin = _rope_tables(config)

    def hidden(self, ids: Tensor, plan: CachePlan | None = None) -> Tensor:
        """The last hidden states [B,T,hidden] of `ids` [B,T], each attending to itself and what stands before.

        Without a plan, rows are whole sequences from position 0, padded on the right if at all. With one, the
        tokens extend the cached sequences that the plan names, and are added to the cache.
        """
        if plan is None:
            positions, mask = torch.arange(ids.shape[1])[None], None
        else:
            positions = plan.positions
            mask = (torch.arange(plan.width) <= positions[..., None])[:, None]
        rope = Rope(self._cos[positions][:, :, None], self._sin[positions][:, :, None])
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, rope, mask, plan)
        return self.model.norm(x)

    def experts(self) -> Tensor | None:
        """[B,T,layers,k]: the experts that the tokens of the last pass went through; None without a mixture."""
        mixtures = [module for module in self.model.modules() if isinstance(module, ExpertBlock)]
        return torch.stack([mixture.choices for mixture in mixtures], dim=2) if mixtures else None

    def forward(self, ids: Tensor) -> Tensor:
        """The logits [B,T,V] of whole sequences `ids` [B,T]."""
        return self.lm_head(self.hidden(ids))

    def save(self, folder: Path) -> None:
        """Writes `folder/model.safetensors` (the config and the tokenizer are not weights)."""
        save_file(_owned_state(self), folder / "model.safetensors", metadata={"format": "pt"})

    def load_weights(self, folder: Path) -> None:
        """Replaces the weights by those of `folder`'s safetensors; see `replace_weights`."""
        self.replace_weights(read_weights(folder), str(folder))

    def replace_weights(self, state: Mapping[str, Tensor], source: str) -> None:
        """Replaces the weights by `state`, which came from `source`, all or none.

        `ConfigError` if a tensor is missing, unknown, of another shape or not finite: the weights are then unchanged.
        """
        own = _owned_state(self)
        if state.keys() != own.keys():
            wrong = sorted(state.keys() ^ own.keys())
            raise ConfigError(f"{source}: tensors don't match the model; first difference: {wrong[0]}")
        for name, tensor in state.items():
            self.check_weight(name, tensor.shape, source)
            if not torch.isfinite(tensor).all():
                raise ConfigError(f"{source}: {name} holds values that are not finite")
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)

    def check_weight(self, name: str, shape: Sequence[int], source: str) -> None:
        """`ConfigError` if the model has no weight `name`, or one of another shape."""
        own = _owned_state(self)
        if name not in own:
            raise ConfigError(f"{source}: the model has no tensor {name}")
        if tuple(shape) != own[name].shape:
            raise ConfigError(f"{source}: shape of {name} is {list(shape)}, the model's {list(own[name].shape)}")

    @classmethod
    def load(cls, folder: Path) -> Qwen3:
        """The model of a Hugging Face folder, in float32 whatever was stored."""
        model = cls(ModelConfig.load(folder))
        model.load_weights(folder)
        return model.eval()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the `*.safetensors` files in `folder`; `ConfigError` if there are none or one is corrupt."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder}: holds no *.safetensors file")
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: not readable as safetensors ({error})") from error
    return state


def _owned_state(model: Qwen3) -> dict[str, Tensor]:
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def _rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine [max_position_embeddings, D] of the default rotary embedding."""
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class ExpertBlock(nn.Module):
    """A router's `top_k` of `count` experts a token, weighed by probability (by their shares of its sum if `normed`).

    `choices` [B,T,top_k] are the experts of the last pass. Parameters are named as Hugging Face saves them.
    """

    def __init__(self, hidden: int, count: int, top_k: int, expert: Callable[[], nn.Module], *, normed: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(count))
        self.choices = torch.zeros(0, 0, top_k, dtype=torch.long)
        self._top_k = top_k
        self._normed = normed

    def forward(self, x: Tensor) -> Tensor:
        flat_NH = x.flatten(0, 1)
        weights_Nk, choices_Nk = torch.softmax(self.gate(flat_NH), dim=-1).topk(self._top_k, dim=-1)
        if self._normed:
            weights_Nk = weights_Nk / weights_Nk.sum(-1, keepdim=True)
        out_NH = torch.zeros_like(flat_NH)
        for number, expert in enumerate(self.experts):
            tokens, places = torch.where(choices_Nk == number)
            if len(tokens):
                out_NH = out_NH.index_add(0, tokens, expert(flat_NH[tokens]) * weights_Nk[tokens, places, None])
        self.choices = choices_Nk.view(*x.shape[:2], self._top_k)
        return out_NH.view_as(x)
