"""A model in training: computes gradients, makes the optimiser's steps, saves weights and loads them.

Everything runs in the training thread. No step is made with an incomplete gradient: if a `forward_backward` fails, the
gradient since the last step is dropped, and the next `optim_step` fails with the same reason. Clients send it without
waiting for the `forward_backward`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from rolltap.errors import CheckpointMismatch, InvalidRequest
from rolltap.trainer_client.data.collate import Batch, predicting
from rolltap.trainer_client.data.packing import Pack, PackedRow, Packer
from rolltap.trainer_client.endpoint.losses import Config, TinkerLoss, find_loss
from rolltap.trainer_client.endpoint.messages import Example, config_of, examples
from rolltap.trainer_client.endpoint.saved import METADATA_FILE, SavedMetadata
from rolltap.trainer_client.model import architectures
from rolltap.trainer_client.model.checkpoint import SavedCheckpoint, load_optimiser
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.weights import save_model, whole_folder
from rolltap.trainer_client.settings import TrainerSettings
from rolltap.types import NO_VERSION, Float32, Segment

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class BaseModelInfo:
    """The base model: the name that clients use for it, the settings of its training, and the ranks."""

    name: str
    settings: TrainerSettings
    ranks: Ranks

    @property
    def config(self) -> Mapping[str, Any]:
        """The `config.json` in the model's folder, read at each access."""
        return json.loads((self.settings.model / "config.json").read_text(encoding="utf-8"))

    def check_name(self, name: str) -> None:
        """Raises `InvalidRequest` if `name` is not this base model."""
        if name != self.name:
            raise InvalidRequest(f"base_model: {name!r} is not served here; {self.name!r} is", param="base_model")

    def settings_for(self, metadata: SavedMetadata) -> TrainerSettings:
        """The settings with adapters of the rank and on the layers in `metadata`. Rank 0 trains all weights.

        Raises `InvalidRequest` if `metadata` selects no layers.
        """
        parts = {"mlp": metadata.train_mlp, "attention": metadata.train_attn, "unembedding": metadata.train_unembed}
        targets = tuple(name for name, trainable in parts.items() if trainable)
        if not targets:
            raise InvalidRequest("lora_config: nothing is to be trained", param="lora_config")
        lora = self.settings.lora.model_copy(update={"rank": metadata.rank, "targets": targets})
        return self.settings.model_copy(update={"lora": lora})


class TrainedModel:
    """The model of one client: the base model, or the saved weights in the folder `state`.

    `seed` sets the adapters' first values; None takes a random one. `optimiser` restores the optimiser's state, too.
    Raises `CheckpointMismatch` if the state does not fit the model.
    """

    def __init__(
        self,
        base: BaseModelInfo,
        metadata: SavedMetadata,
        seed: int | None,
        state: Path | None = None,
        *,
        optimiser: bool = False,
    ) -> None:
        self.base, self.metadata = base, metadata
        settings = base.settings_for(metadata)
        torch.manual_seed(torch.seed() % 2**63 if seed is None else seed)
        model_in_state = state is not None and not metadata.rank  # with adapters, a state has only the adapters
        self.learner = Learner(state if model_in_state and state else settings.model, settings, base.ranks)
        if state is not None:
            self._restore(state, optimiser=optimiser)
        config = self.learner.model.config
        self.vocabulary: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        compute = settings.compute
        self._pack = Packer(
            compute.token_budget, compute.share_prefixes, alone=architectures.rows_alone(self.learner.model.config)
        )
        self._has_gradient = False
        self._failure = ""  # why the gradient of the next step is incomplete

    def compute(self, message: pb.ForwardBackwardRequest) -> tuple[list[Float32], float]:
        """Returns the log-probs [T] or [T, K] of each datum's targets, and the loss.

        Adds the loss's gradient to the gradient of the next step, unless the message is `forward_only`. If that fails,
        drops the whole gradient and raises; the next step will fail with the same reason.
        """
        try:
            loss = find_loss(message.loss_fn)
            config = loss.config(message.loss_fn, config_of(message))
            results = self._pass(loss, config, examples(message), backward=not message.forward_only)
        except Exception as error:
            if not message.forward_only:
                self.learner.forget()  # the next step will fail with this reason
                self._failure = self._failure or str(error)
            raise
        self._has_gradient = self._has_gradient or not message.forward_only
        return results

    def optim_step(self, params: types.OptimParams) -> dict[str, float]:
        """Makes one step of AdamW and returns its metrics. The gradient is dropped afterwards, also if the step fails.

        Raises `InvalidRequest`, with the weights unchanged, if there is no gradient, a `forward_backward` since the
        last step failed, the gradient's norm is not finite, or `params` are not valid `AdamParams`.
        """
        try:
            if self._failure:
                raise InvalidRequest(f"no step: a forward_backward that belongs to it failed ({self._failure})")
            if not self._has_gradient:
                raise InvalidRequest("no step: there is no gradient; send forward_backward before")
            if not isinstance(params, types.AdamParams):
                raise InvalidRequest(f"no step: {params.type} is not supported here, AdamParams is")
            adam = _adamw_settings(params)
            norm = self.learner.clip(params.grad_clip_norm or math.inf)
            if not math.isfinite(norm):
                raise InvalidRequest(f"no step: the gradient's norm is {norm}; the weights are as before")
            self.learner.apply_with(**adam)
        finally:
            self.drop_gradient()
        return {"grad_norm": norm}

    def drop_gradient(self) -> None:
        """Drops the gradient and the record of a failure. The next step needs a new `forward_backward`."""
        self.learner.forget()
        self._failure, self._has_gradient = "", False

    def save_state(self, folder: Path, metadata: SavedMetadata) -> None:
        """Saves what training needs to go on: the weights (with a rank, only the adapters) and the optimiser's state.

        A gradient that no step has applied is not saved. `folder` appears only when it is complete.
        """
        learner = self.learner
        has_optimiser = bool(learner.optimiser.state)  # before the first step, torch would make one to read the state
        with whole_folder(folder) as temporary:
            if not self.metadata.rank:
                save_model(learner.model, learner.weights(), temporary, self.base.settings.model)
            if has_optimiser:
                torch.save(learner.state(), temporary / "optimiser.pt")
            elif self.metadata.rank:
                torch.save(learner.adapters(), temporary / "adapters.pt")
            self._describe(temporary, metadata, has_optimiser=has_optimiser)

    def save_sampler(self, folder: Path, metadata: SavedMetadata) -> None:
        """Saves a model folder that any engine can load, with the adapters merged into the weights."""
        with whole_folder(folder) as temporary:
            save_model(self.learner.model, self.learner.weights(), temporary, self.base.settings.model)
            self._describe(temporary, metadata, has_optimiser=False)

    def _describe(self, folder: Path, metadata: SavedMetadata, *, has_optimiser: bool) -> None:
        """Writes `metadata`, with the time of creation, beside the weights."""
        metadata = msgspec.structs.replace(metadata, created=time.time(), has_optimiser=has_optimiser)
        (folder / METADATA_FILE).write_bytes(msgspec.json.encode(metadata))

    def _restore(self, state: Path, *, optimiser: bool) -> None:
        """Loads the adapters from the folder `state` and, with `optimiser`, the optimiser's state if one was saved.

        Raises `CheckpointMismatch` if they do not fit.
        """
        if (state / "optimiser.pt").exists():
            saved = load_optimiser(SavedCheckpoint(0, 0, state))
            if optimiser:
                self.learner.restore(saved)
                return
            adapters = saved.get("adapters")
        else:
            adapters = torch.load(state / "adapters.pt", weights_only=True) if self.metadata.rank else None
        if adapters is None:
            return
        try:
            self.learner.take_adapters(adapters)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointMismatch(f"the saved adapters are not of this model: {error}") from error

    def _pass(
        self, loss: TinkerLoss, config: Config, data: Sequence[Example], *, backward: bool
    ) -> tuple[list[Float32], float]:
        """The log-probs and the loss of `data`, computed pack by pack; with `backward`, also adds the gradient."""
        if not data:
            raise InvalidRequest("data: there is none", param="data")
        for number, example in enumerate(data):
            self._check(f"datum {number}", example, loss.inputs)
        rows = [PackedRow.uniform(_as_segment(example), number, number) for number, example in enumerate(data)]
        outputs: list[Float32] = [np.zeros(0, np.float32)] * len(data)
        total = 0.0
        for pack in self._pack(rows):
            batch = batch_of(pack, data).to(self.learner.device)
            if backward:
                logprobs_M = self.learner.predict(batch).logprobs_M
            else:
                logprobs_M = torch.from_numpy(self.learner.read("", batch).logprobs).to(self.learner.device)
            value = loss.compute(logprobs_M, batch.extra, config)
            if not math.isfinite(float(value.detach())):
                raise InvalidRequest(f"the loss is {float(value.detach())}")
            total += float(value.detach())
            if backward:
                self.learner.backward(value)
            _split_by_datum(logprobs_M.detach().float().cpu().numpy(), pack, data, outputs)
        return outputs, total

    def _check(self, where: str, example: Example, loss_inputs: Sequence[str]) -> None:
        """Raises `InvalidRequest` if the model or the loss can't take the example. `where` names it in the message."""
        length = len(example.token_ids)
        if not 0 < length <= self.context:
            raise InvalidRequest(f"{where}: model_input has {length} tokens; the model takes 1 to {self.context}")
        if set(example.inputs) != {TARGETS, *loss_inputs}:
            names, required = ", ".join(example.inputs) or "nothing", ", ".join((TARGETS, *loss_inputs))
            raise InvalidRequest(f"{where}: loss_fn_inputs has {names}; this loss takes {required}")
        targets = example.inputs[TARGETS]
        for name, ids in (("model_input", example.token_ids), (TARGETS, targets)):
            if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= self.vocabulary:
                raise InvalidRequest(f"{where}: {name} has ids out of the vocabulary of {self.vocabulary}")
        for name in loss_inputs:
            values = example.inputs[name]
            if values.shape != targets.shape:
                shapes = f"{list(values.shape)}, {TARGETS} {list(targets.shape)}"
                raise InvalidRequest(f"{where}: {name} has the shape {shapes}")
            if not np.isfinite(values).all():
                raise InvalidRequest(f"{where}: {name} has values that are not finite")


def batch_of(pack: Pack, examples: Sequence[Example]) -> Batch:
    """The pack's tensors. All M targets of its tokens are predicted, also those with weight 0.

    `extra` has the loss's inputs [M]. The fields that only recipes use are zeros.
    """
    inputs = [examples[row.number].inputs for row in pack.rows]
    widths = [arrays[TARGETS].size // len(place) for arrays, place in zip(inputs, pack.places, strict=True)]
    sources = [np.repeat(place, width) for place, width in zip(pack.places, widths, strict=True)]
    sources_U, states_M = predicting(np.concatenate(sources))
    extra = {name: _flat([arrays[name] for arrays in inputs], np.float32) for name in inputs[0] if name != TARGETS}
    targets_M = _flat([arrays[TARGETS] for arrays in inputs], np.int64)
    zeros_M = torch.zeros(len(targets_M))
    return Batch(
        token_ids_N=torch.from_numpy(pack.token_ids_N.astype(np.int64)),
        position_ids_N=torch.from_numpy(pack.position_ids_N.astype(np.int64)),
        spans=pack.spans,
        sources_U=sources_U,
        states_M=states_M,
        targets_M=targets_M,
        logprobs_M=zeros_M,
        versions_M=torch.full_like(targets_M, NO_VERSION),
        advantages_M=zeros_M,
        weights_M=zeros_M,
        rollouts_M=torch.zeros_like(targets_M),
        rows=len(pack.rows),
        unshared_tokens=sum(map(len, pack.rows)),
        extra=extra,
    )


def _split_by_datum(logprobs_M: Float32, pack: Pack, examples: Sequence[Example], outputs: list[Float32]) -> None:
    """Writes the pack's log-probs to `outputs`, each datum's at its number and in the shape of its targets."""
    start = 0
    for row in pack.rows:
        shape = examples[row.number].inputs[TARGETS].shape
        count = math.prod(shape)
        outputs[row.number] = logprobs_M[start : start + count].reshape(shape)
        start += count


def _flat(arrays: Sequence[NDArray[Any]], dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(dtype))


def _as_segment(example: Example) -> Segment:
    """The example's token ids as a segment without trained tokens, the form that `Packer` needs."""
    size = len(example.token_ids)
    no_versions = np.full(size, NO_VERSION, np.int32)
    return Segment(example.token_ids, np.zeros(size, bool), np.zeros(size, np.float32), no_versions, ())


def _adamw_settings(params: types.AdamParams) -> Mapping[str, Any]:
    """The keyword arguments of torch's AdamW. Raises `InvalidRequest` if a value is out of its range."""
    values = (params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm)
    valid = all(map(math.isfinite, values)) and min(values) >= 0 and max(params.beta1, params.beta2) < 1
    if not valid:
        raise InvalidRequest(f"no step: AdamParams are {params}; finite ones are wanted, and betas under 1")
    return {
        "lr": params.learning_rate,
        "betas": (params.beta1, params.beta2),
        "eps": params.eps,
        "weight_decay": params.weight_decay,
    }
