"""The model in training: its weights, optimiser and device.

Weights and the optimiser's state are float32. In one CPU process with float32 activations, the model is used as it is.
Otherwise FSDP2 shards it layer by layer, with activations of the configured dtype and gradients reduced in float32.
Checkpoints are the same in both cases, so a run may resume with another number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as distributed_state
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rolltap.errors import CheckpointMismatch, ConfigError
from rolltap.trainer_client.data.collate import Batch
from rolltap.trainer_client.model.lora import add_adapters, merged, without_adapters
from rolltap.trainer_client.model.network import PolicyNetwork, Predictions, load_model
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.routing import Mixture
from rolltap.trainer_client.model.vision import sees
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.settings import OptimiserSettings, TrainerSettings
from rolltap.types import Float32

WIDE = 512
"""Hidden width from which bfloat16 pays on a CPU that has it: a step takes 1.6 times float32's time at 128, as much at
320, less than half at 576 (docs/notes/trainer.md)."""

ADAPTERS = distributed_state.StateDictOptions(full_state_dict=True, strict=False)
WHOLE = distributed_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
TRAINED = distributed_state.StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)


def learning_rate(settings: OptimiserSettings, step: int, steps: int) -> float:
    """The learning rate of `step` (from 1): `lr`, with a linear warm-up and a linear decay to `lr * lr_end`."""
    rise = min(1.0, step / max(1, settings.warmup))
    done = min(1.0, (step - 1) / max(1, steps - 1))
    return settings.lr * rise * (1.0 + done * (settings.lr_end - 1.0))


@dataclass(frozen=True, slots=True, eq=False)
class Readout:
    """A network's outputs at a batch's trained tokens, each [M]. `values` are those of heads, or others by name."""

    logprobs: Float32
    entropy: Float32
    values: Mapping[str, Float32]


class Learner:
    """The policy's weights in training, and the frozen reference model if the loss has a KL term.

    The reference has the initial weights. With adapters it is the model without them, not a copy.
    """

    def __init__(self, folder: Path, settings: TrainerSettings, ranks: Ranks, recipe: Recipe | None = None) -> None:
        recipe = recipe or Recipe()
        self.device = ranks.device
        self._ranks = ranks
        self._settings = settings.optimiser
        self._steps = settings.steps
        self._lora = settings.lora if settings.lora.rank else None
        model = load_model(settings.model if self._lora else folder, torch.float32)
        dtype = _activations(settings.compute.dtype, ranks.device, model.config.get_text_config().hidden_size)
        if self._lora and sees(model.config):
            raise ConfigError(f"{model.config.model_type} sees images, and such models get no adapters: lora.rank = 0")
        if self._lora:
            add_adapters(model, self._lora)
        network = PolicyNetwork(
            model.train(),
            heads=recipe.heads,
            entropy_moves=recipe.entropy_moves,
            routers_move=bool(settings.router.balance or settings.router.z),
        )
        if settings.compute.gradient_checkpointing:
            checkpoint_activations(model, network.mixture)
        self.network = _placed(network, dtype, ranks)
        self.reference = None
        self._has_reference = settings.loss.kl > 0
        if self._has_reference and not self._lora:
            frozen = load_model(settings.model, torch.float32).requires_grad_(False)
            self.reference = _placed(PolicyNetwork(frozen.train()), dtype, ranks)
        self._readable = recipe.networks()
        self.read_networks: dict[str, PolicyNetwork] = {}
        for name, readable in self._readable.items():
            source = Path(readable.folder) if readable.folder else settings.model
            other = load_model(source, torch.float32).requires_grad_(False)
            heads = recipe.heads if readable.decay is not None else {}
            if readable.decay is not None and other.config.tie_word_embeddings != model.config.tie_word_embeddings:
                raise ConfigError(
                    f"the recipe's network {name!r} follows the policy and has one weight for embedding and "
                    "projection: leave the vocabulary's projection out of lora.targets"
                )
            self.read_networks[name] = _placed(PolicyNetwork(other.train(), heads=heads), dtype, ranks)
            self.read_networks[name].heads.requires_grad_(False)
        self._rates = [1.0, *(head.lr / settings.optimiser.lr for head in recipe.heads.values())]
        policy = [weight for weight in self.model.parameters() if weight.requires_grad]
        self._parts = [policy, *(list(self.network.heads[name].parameters()) for name in recipe.heads)]
        self.optimiser = torch.optim.AdamW(
            [{"params": weights} for weights in self._parts],
            lr=settings.optimiser.lr,
            betas=settings.optimiser.betas,
            weight_decay=settings.optimiser.weight_decay,
        )

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.network.model

    def predict(self, batch: Batch) -> Predictions:
        """The policy's log-probs of the batch's trained tokens, with gradient."""
        return self.network(batch)

    def read(self, network: str, batch: Batch) -> Readout:
        """The readout of the batch's trained tokens by the policy or a read network, on the CPU, without gradient."""
        predicted = _read(
            self.read_networks.get(network, self.network), batch, replay=network not in self.read_networks
        )
        values = {name: value.float().cpu().numpy() for name, value in predicted.values.items()}
        return Readout(predicted.logprobs_M.float().cpu().numpy(), predicted.entropy_M.float().cpu().numpy(), values)

    @torch.no_grad()
    def update_followers(self, step: int) -> None:
        """After `step`, moves the networks with a `decay` towards the policy: weights, heads, and merged adapters."""
        for name, readable in self._readable.items():
            if readable.decay is not None and step % readable.every == 0:
                weights: dict[str, Tensor] = dict(self.network.named_parameters())
                policy = merged(weights, self._lora) if self._lora else weights
                for weight, followed in self.read_networks[name].named_parameters():
                    followed.data.lerp_(policy[weight].data, 1 - readable.decay)

    def with_reference(self, batch: Batch) -> Batch:
        """The batch with the reference's log-probs, if there is a reference."""
        if not self._has_reference:
            return batch
        if self.reference is not None:
            return replace(batch, reference_M=_read(self.reference, batch, replay=False).logprobs_M)
        with without_adapters(self.model):
            return replace(batch, reference_M=_read(self.network, batch, replay=False).logprobs_M)

    def with_proximal(self, batch: Batch) -> Batch:
        """The batch with the policy's log-probs as they are now."""
        return replace(batch, proximal_M=_read(self.network, batch, replay=True).logprobs_M)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of this rank's share of a loss that is a sum over ranks (FSDP takes the mean)."""
        (loss * self._ranks.size).backward()

    def clip(self, most: float | None = None) -> float:
        """Clips the norm of the policy's gradient, and of each head's, to `most` (None: the settings' limit).

        Returns the policy's norm before clipping, or the first norm that is not finite.
        """
        limit = self._settings.grad_clip if most is None else most
        norms = [nn.utils.clip_grad_norm_(weights, limit) for weights in self._parts]
        plain = [float(norm.full_tensor() if isinstance(norm, DTensor) else norm) for norm in norms]
        return next((norm for norm in plain if not math.isfinite(norm)), plain[0])

    def apply(self, step: int) -> float:
        """Makes the optimiser's step of `step` (from 1) and drops the gradient; returns the learning rate.

        Heads have learning rates of their own, with the policy's warm-up and decay.
        """
        lr = learning_rate(self._settings, step, self._steps)
        for parameters, rate in zip(self.optimiser.param_groups, self._rates, strict=True):
            parameters["lr"] = lr * rate
        self.optimiser.step()
        self.forget()
        return lr

    def apply_with(self, **adam: Any) -> None:
        """Makes an optimiser step with these settings of AdamW instead of the run's, and drops the gradient."""
        for parameters in self.optimiser.param_groups:
            parameters.update(adam)
        self.optimiser.step()
        self.forget()

    def forget(self) -> None:
        """Drops the gradient."""
        self.optimiser.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Any]:
        """The model's whole state on the CPU, with adapters merged in, for the lead rank. Call it on all ranks."""
        state: dict[str, Any] = distributed_state.get_model_state_dict(self.model, options=WHOLE)
        return merged(state, self._lora) if self._lora else state

    def state(self) -> dict[str, Any]:
        """The optimiser's whole state on the CPU, by the weights' names, with adapters, heads and read networks.

        Call it on all ranks.
        """
        state: dict[str, Any] = distributed_state.get_optimizer_state_dict(self.network, self.optimiser, options=WHOLE)
        if self._lora:
            state["adapters"] = self.adapters()
        if self.network.heads:
            state["heads"] = distributed_state.get_model_state_dict(self.network.heads, options=WHOLE)
        for name, readable in self._readable.items():
            if readable.decay is not None:
                followed = self.read_networks[name]
                state[f"network {name}"] = distributed_state.get_model_state_dict(followed, options=WHOLE)
        return state

    def adapters(self) -> dict[str, Any]:
        """The adapters on the CPU, by name, for the lead rank. Call it on all ranks."""
        return distributed_state.get_model_state_dict(self.model, options=TRAINED)

    def take_adapters(self, adapters: dict[str, Any]) -> None:
        """Loads a result of `adapters()`; raises torch's error (`RuntimeError` or another) if they don't fit."""
        distributed_state.set_model_state_dict(self.model, adapters, options=ADAPTERS)

    def restore(self, state: dict[str, Any], *, changed: bool = False) -> None:
        """Restores a result of `state`, but keeps this run's settings of the optimiser.

        `CheckpointMismatch` if it is of another model. A `changed` recipe may have other heads.
        """
        adapters = state.pop("adapters", None)
        heads = state.pop("heads", {})
        followed = {name: state.pop(f"network {name}") for name in self._readable if f"network {name}" in state}
        if (adapters is None) != (self._lora is None):
            raise CheckpointMismatch(
                "the checkpoint was made with adapters and this run has none, or the other way round"
            )
        options = replace(WHOLE, strict=not changed)
        groups = self.optimiser.param_groups
        # Loading replaces the settings by the checkpoint's.
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        try:
            if adapters is not None:
                self.take_adapters(adapters)
            if changed:
                heads, state = _of_heads(set(self.network.heads), heads, state)
            if heads or (self.network.heads and not changed):
                distributed_state.set_model_state_dict(self.network.heads, heads, options=options)
            for name, weights in followed.items():
                distributed_state.set_model_state_dict(self.read_networks[name], weights, options=options)
            distributed_state.set_optimizer_state_dict(self.network, self.optimiser, state, options=options)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointMismatch(f"the checkpoint's optimiser is not of this model: {error}") from error
        for group, own in zip(self.optimiser.param_groups, settings, strict=True):
            group.update(own)


def _of_heads(names: Collection[str], heads: dict[str, Any], state: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """A checkpoint without the heads that are not in `names`: the heads' weights, and the optimiser's state."""

    def is_of_names(weight: str) -> bool:
        return not weight.startswith("heads.") or weight.split(".")[1] in names

    groups = [group for group in state["param_groups"] if all(map(is_of_names, group["params"]))]
    weights = {name: value for name, value in state["state"].items() if is_of_names(name)}
    return {name: head for name, head in heads.items() if is_of_names(f"heads.{name}")}, {
        **state,
        "state": weights,
        "param_groups": groups,
    }


def _read(network: PolicyNetwork, batch: Batch, *, replay: bool) -> Predictions:
    """A network's predictions, without gradient. The policy replays recorded experts; other networks route themselves.

    FSDP keeps the outermost weights gathered until a backward pass. There is none here, so `reshard` drops them: else
    they would stay as they are now while the shards change.
    """
    with torch.no_grad():
        predicted = network(batch, replay)
    if isinstance(network, FSDPModule):
        network.reshard()
    return predicted


def _activations(name: str, device: torch.device, width: int) -> torch.dtype:
    """The dtype of activations of a model with this hidden width."""
    if name == "auto":
        pays = device.type == "cuda" or (device.type == "cpu" and width >= WIDE and _has_bfloat16())
        name = "bfloat16" if pays else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16; without it, torch would convert to float32 and back."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def checkpoint_activations(model: Any, mixture: Mixture) -> None:
    """Turns on activation checkpointing; the method's name depends on the release of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": mixture.checkpoint_contexts})


def _placed(network: PolicyNetwork, dtype: torch.dtype, ranks: Ranks) -> PolicyNetwork:
    """The network on its device, sharded unless it is float32 in one CPU process."""
    if ranks.size == 1 and ranks.device.type == "cpu" and dtype is torch.float32:
        return network
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = ranks.mesh()
    for layer in network.model.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(network, mesh=mesh, mp_policy=mixed)
    return network.to(ranks.device)
