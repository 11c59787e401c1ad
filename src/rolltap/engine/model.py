"""The network that the embedded engine samples from: any causal language model that transformers has; and its key-value
cache.

transformers computes it, by the folder's `config.json`; this module knows its weights by their names in the folder's
files, replaces them, and names what can't be served. A prompt's tokens are kept by position, so that a request can go
on from any prefix of another: models whose layers keep a state instead of keys and values are refused. A slot's columns
`[0, n)` of the cache hold its first n tokens. One column more takes the writes of padding, and is never attended to.
Columns are added by doubling as sequences grow.

Shapes: `B` rows, `T` new tokens a row, `C` cached columns, `V` vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from rolltap.errors import ConfigError

FIRST_COLUMNS = 256


class SlotCache(Cache):
    """Keys and values of `slots` sequences of at most `length` tokens.

    `place` says where the next forward pass stands: `rows` [B,1] are slots, `view` the same as a slice where they are
    contiguous (a view costs nothing, a gathered copy does), `positions` [B,T] the places of the new tokens in their
    sequences, `columns` [B,T] the columns that are written (`columns_held` for padding).
    """

    def __init__(self, layers: int, slots: int, length: int) -> None:
        self.slots, self.length = slots, length
        self.columns_held = min(length, FIRST_COLUMNS)
        self.rows = self.positions = self.columns = torch.zeros(1, 1, dtype=torch.long)
        self.view: slice | Tensor = slice(0, 1)
        self.width = 1
        self._slot_layers = [_SlotLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self._slot_layers))

    def place(self, rows: Tensor, view: slice | Tensor, positions: Tensor, columns: Tensor, width: int) -> None:
        """`width`: the columns that the pass attends to."""
        self.rows, self.view, self.positions, self.columns, self.width = rows, view, positions, columns, width

    def grow(self, columns: int) -> None:
        """Makes room for `columns` tokens a slot; what is cached stays."""
        if columns > self.columns_held:
            before, self.columns_held = self.columns_held, min(self.length, max(columns, 2 * self.columns_held))
            for layer in self._slot_layers:
                layer.grow(before)


class _SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [slots, heads, columns + 1, width of a head]."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def grow(self, columns: int) -> None:
        """Makes room as the cache says; its first `columns` stay."""
        for name in ("keys", "values") if self.is_initialized else ():
            old = getattr(self, name)
            new = self._empty(old)
            new[:, :, :columns] = old[:, :, :columns]
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new tokens' [B,heads,T,width]; returns those of all columns that are attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        at = self._cache
        self.keys[at.rows, :, at.columns] = key_states.transpose(1, 2)
        self.values[at.rows, :, at.columns] = value_states.transpose(1, 2)
        return self.keys[at.view, :, : at.width], self.values[at.view, :, : at.width]

    def _empty(self, like: Tensor) -> Tensor:
        _, heads, _, width = like.shape
        return like.new_zeros(self._cache.slots, heads, self._cache.columns_held + 1, width)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        return self._cache.width

    def get_max_length(self) -> int:
        return self._cache.length


KEPT_LAYERS = {"full_attention", "sliding_attention"}
"""Kinds of layers whose keys and values are kept by position."""

ROPES_OF_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest row of a batch: a request would depend on its neighbours."""

SCORED_AT_ONCE = 256
"""Positions whose logits exist at once where given ids are scored."""


class CausalModel:
    """A causal language model of transformers, with its weights named as in the files of a Hugging Face folder.

    `vocabulary` is the number of logits, `longest` the most positions of a sequence (0: the configuration has none).
    """

    def __init__(self, network: Any) -> None:
        self.network = network.eval()
        text = network.config.get_text_config()
        self.vocabulary: int = network.get_output_embeddings().out_features
        self.longest: int = getattr(text, "max_position_embeddings", 0) or 0
        self.layers: int = text.num_hidden_layers
        parameter = next(network.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        window = getattr(text, "sliding_window", None) or 0
        default = ("sliding_attention" if window else "full_attention",)
        self._kinds: set[str] = set(getattr(text, "layer_types", None) or default)
        self._window = window if "sliding_attention" in self._kinds else 0
        self._is_eager = network.config._attn_implementation == "eager"
        self._shapes = {name: tensor.shape for name, tensor in self._saved_state().items()}
        self._choices: list[Tensor] = []
        for module in network.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(lambda _, __, output: self._choices.append(output[2]))

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> CausalModel:
        """The model of a Hugging Face folder. `ConfigError` if it can't be served, or its weights are incomplete."""
        config = read_config(folder)
        state = read_weights(folder)
        _check_finite(state, str(folder))
        return cls(_build(config, state, dtype, str(folder)).to(device))

    def logits(self, ids: Tensor, cache: SlotCache) -> Tensor:
        """Logits [B,T,V] of `ids` [B,T], float32, as `cache` has them extend its rows."""
        self._choices.clear()
        return self.network(input_ids=ids, **self._extending(cache)).logits.float()

    def extend(self, ids: Tensor, cache: SlotCache) -> None:
        """Adds `ids` [B,T] to the rows of `cache`, without the cost of logits."""
        self.network.base_model(input_ids=ids, **self._extending(cache))
        self._choices.clear()

    def experts(self, rows: int) -> Tensor | None:
        """The experts [B,T,layers,k] that the tokens of the last `logits` of so many rows went through.

        None where the model is no mixture.
        """
        if not self._choices:
            return None
        return torch.stack([choice.view(rows, -1, choice.shape[-1]) for choice in self._choices], 2)

    def score(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """The logits [T,V] of a whole sequence, float32, in pieces of `SCORED_AT_ONCE` positions."""
        past: Cache = DynamicCache(config=self.network.config)
        whole = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        for piece in whole.split(SCORED_AT_ONCE, 1) if ids else ():
            yield self.network(input_ids=piece, past_key_values=past, use_cache=True).logits[0].float()
        self._choices.clear()

    def _extending(self, cache: SlotCache) -> dict[str, Any]:
        positions = cache.positions
        columns = torch.arange(cache.width, device=positions.device)
        seen = (columns <= positions[..., None])[:, None]
        masks = {"full_attention": seen}
        if self._window:
            masks["sliding_attention"] = seen & (columns > positions[..., None] - self._window)[:, None]
        if self._is_eager:
            least = torch.finfo(self.dtype).min
            masks = {kind: torch.where(mask, 0.0, least).to(self.dtype) for kind, mask in masks.items()}
        mask: Any = masks if len(self._kinds) > 1 else masks[next(iter(self._kinds))]
        return {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}

    # Weights

    def save(self, folder: Path) -> None:
        """Writes `config.json`, `generation_config.json` and `model.safetensors`."""
        self.network.save_pretrained(folder)

    def load_weights(self, folder: Path) -> None:
        """Replaces the weights by those of `folder`'s safetensors; see `replace_weights`."""
        self.replace_weights(read_weights(folder), str(folder))

    def replace_weights(self, state: Mapping[str, Tensor], source: str) -> None:
        """Replaces the weights by `state`, which came from `source`, all or none.

        `ConfigError` if a tensor is missing, unknown, of another shape or not finite, or if it unties weights that the
        model shares: the weights are then unchanged.
        """
        state = self._without_ties(state, source)
        if state.keys() != self._shapes.keys():
            wrong = sorted(state.keys() ^ self._shapes.keys())
            raise ConfigError(f"{source}: tensors don't match the model; first difference: {wrong[0]}")
        for name, tensor in state.items():
            self.check_weight(name, tensor.shape, source)
        _check_finite(state, source)
        own = self.network.state_dict()
        if not state.keys() <= own.keys():  # the network holds some otherwise than the files, as experts in one tensor
            state = _build(self.network.config, dict(state), self.dtype, source).state_dict()
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)

    def check_weight(self, name: str, shape: Sequence[int], source: str) -> None:
        """`ConfigError` if the model has no weight `name`, or one of another shape."""
        if name in self._shapes and tuple(shape) != self._shapes[name]:
            raise ConfigError(f"{source}: shape of {name} is {list(shape)}, the model's {list(self._shapes[name])}")
        if name not in self._shapes and name not in self._ties:
            raise ConfigError(f"{source}: the model has no tensor {name}")

    @property
    def _ties(self) -> dict[str, str]:
        """Names of weights that are another's, with that one's name."""
        return dict(getattr(self.network, "all_tied_weights_keys", None) or {})

    def _saved_state(self) -> dict[str, Tensor]:
        """The weights by their names in files."""
        state = {name: tensor for name, tensor in self.network.state_dict().items() if name not in self._ties}
        return revert_weight_conversion(self.network, state)

    def _without_ties(self, state: Mapping[str, Tensor], source: str) -> Mapping[str, Tensor]:
        """Without the copies of shared weights, which some trainers send: they must equal what they are tied to."""
        for name, original in self._ties.items():
            if name in state and original in state and not torch.equal(state[name], state[original]):
                raise ConfigError(
                    f"{source}: {name} differs from {original}, but the model's configuration ties them "
                    "(tie_word_embeddings): serve a folder whose configuration does not, or train them tied"
                )
        return {name: tensor for name, tensor in state.items() if name not in self._ties}


def read_config(folder: Path) -> Any:
    """transformers' configuration of `folder`; `ConfigError` for a model that can't be served."""
    path = folder / "config.json"
    try:
        json.loads(path.read_text())
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path}: not a readable model configuration ({error})") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{path}: model_type {config.model_type} is no causal language model of transformers")
    text = config.get_text_config()
    if unknown := set(getattr(text, "layer_types", None) or ()) - KEPT_LAYERS:
        raise ConfigError(
            f"{path}: its layers of {', '.join(sorted(unknown))} keep no keys and values by position, which this "
            "engine needs; serve it with vLLM or SGLang"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type", "default")) in ROPES_OF_LENGTH:
        raise ConfigError(f"{path}: rope_type {kind} depends on the longest sequence; serve it with vLLM or SGLang")
    return config


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


def _build(config: Any, state: dict[str, Tensor], dtype: torch.dtype, source: str) -> nn.Module:
    """The network with the weights `state`, by their names in files; they came from `source`."""
    transformers_logging.disable_progress_bar()
    is_capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)  # which only eager attention computes
    network_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
    for attention in ("eager",) if is_capped else ("sdpa", "eager"):
        try:
            network, report = network_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, RuntimeError, ValueError) as error:
            if attention == "sdpa" and "scaled_dot_product_attention" in str(error):
                continue
            raise ConfigError(f"{source}: {error}") from error
        if wrong := sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]])):
            raise ConfigError(f"{source}: tensors don't match config.json; first difference: {wrong[0]}")
        return network
    raise AssertionError("eager attention is refused by none")


def _check_finite(state: Mapping[str, Tensor], source: str) -> None:
    for name, tensor in state.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ConfigError(f"{source}: {name} holds values that are not finite")
