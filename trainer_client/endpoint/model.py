"""A model in training: gradients of what clients send, the optimiser's steps, what is saved and loaded.

One thread computes. A gradient is whole or gives no step: if a `forward_backward` fails, what the ones before it
gathered is dropped with it, and the next `optim_step`, which clients send without waiting, fails with the reason.
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
from rolltap.trainer_client import architectures
from rolltap.trainer_client.checkpoint import Saved, load_optimiser
from rolltap.trainer_client.collate import Batch
from rolltap.trainer_client.endpoint.losses import Config, TinkerLoss, find_loss
from rolltap.trainer_client.endpoint.messages import Example, config_of, examples
from rolltap.trainer_client.endpoint.saved import ABOUT, About
from rolltap.trainer_client.learner import Learner
from rolltap.trainer_client.packing import Pack, PackedRow, Packer
from rolltap.trainer_client.ranks import Ranks
from rolltap.trainer_client.settings import TrainerSettings
from rolltap.trainer_client.weights import save_model, whole_folder
from rolltap.types import NO_VERSION, Float32, Segment

TARGETS = "target_tokens"


@dataclass(frozen=True, slots=True)
class Base:
    """The model that clients start from, by the name they know it by, and how it is trained."""

    name: str
    settings: TrainerSettings
    ranks: Ranks

    @property
    def config(self) -> Mapping[str, Any]:
        """The folder's `config.json`."""
        return json.loads((self.settings.model / "config.json").read_text(encoding="utf-8"))

    def check_name(self, name: str) -> None:
        """`InvalidRequest` if a client means another model."""
        if name != self.name:
            raise InvalidRequest(f"base_model: {name!r} is not served here; {self.name!r} is", param="base_model")

    def settings_for(self, about: About) -> TrainerSettings:
        """With adapters of the rank that the client asks for; 0 trains all weights."""
        parts = {"mlp": about.train_mlp, "attention": about.train_attn, "unembedding": about.train_unembed}
        targets = tuple(name for name, trained in parts.items() if trained)
        if not targets:
            raise InvalidRequest("lora_config: nothing is to be trained", param="lora_config")
        lora = self.settings.lora.model_copy(update={"rank": about.rank, "targets": targets})
        return self.settings.model_copy(update={"lora": lora})


class TrainedModel:
    """A model of one client. `state`, where it goes on from saved weights, is their folder."""

    def __init__(
        self, base: Base, about: About, seed: int | None, state: Path | None = None, *, optimiser: bool = False
    ) -> None:
        self.base, self.about = base, about
        settings = base.settings_for(about)
        torch.manual_seed(torch.seed() % 2**63 if seed is None else seed)
        whole = state is not None and not about.rank
        self.learner = Learner(state if whole and state else settings.model, settings, base.ranks)
        if state is not None:
            self._restore(state, optimiser=optimiser)
        config = self.learner.model.config
        self.vocabulary: int = config.vocab_size
        self.context: int = config.max_position_embeddings
        compute = settings.compute
        self._pack = Packer(
            compute.token_budget, compute.share_prefixes, alone=architectures.rows_alone(self.learner.model.config)
        )
        self._gathered = False
        self._failure = ""

    def compute(self, message: pb.ForwardBackwardRequest) -> tuple[list[Float32], float]:
        """The log-probs of each datum's targets, and the loss. Unless the message wants the forward pass alone, the
        loss's gradient is added to what was gathered since the last step."""
        try:
            loss = find_loss(message.loss_fn)
            config = loss.config(message.loss_fn, config_of(message))
            results = self._pass(loss, config, examples(message), backward=not message.forward_only)
        except Exception as error:
            if not message.forward_only:
                self._spoil(str(error))
            raise
        self._gathered = self._gathered or not message.forward_only
        return results

    def _spoil(self, reason: str) -> None:
        """The gradient under way lacks something: it is dropped, and the step that it was for will fail."""
        self.learner.forget()
        self._failure = self._failure or reason

    def optim_step(self, params: types.OptimParams) -> dict[str, float]:
        """One step of AdamW; the gradient is gone afterwards, whatever came of it."""
        try:
            if self._failure:
                raise InvalidRequest(f"no step: a forward_backward that belongs to it failed ({self._failure})")
            if not self._gathered:
                raise InvalidRequest("no step: there is no gradient; send forward_backward before")
            if not isinstance(params, types.AdamParams):
                raise InvalidRequest(f"no step: {params.type} is not done here, AdamParams are")
            adam = _adam(params)
            norm = self.learner.clip(params.grad_clip_norm or math.inf)
            if not math.isfinite(norm):
                raise InvalidRequest(f"no step: the gradient's norm is {norm}; the weights are as before")
            self.learner.apply_with(**adam)
        finally:
            self.drop_gradient()
        return {"grad_norm": norm}

    def drop_gradient(self) -> None:
        """What was gathered, and what failed, is of no step."""
        self.learner.forget()
        self._failure, self._gathered = "", False

    def save_state(self, folder: Path, about: About) -> None:
        """What training can go on from: weights and optimiser, without a gradient that was not applied."""
        learner = self.learner
        stepped = bool(learner.optimiser.state)  # torch would make a first step to ask an optimiser for its state
        with whole_folder(folder) as making:
            if not self.about.rank:
                save_model(learner.model, learner.weights(), making, self.base.settings.model)
            if stepped:
                torch.save(learner.state(), making / "optimiser.pt")
            elif self.about.rank:
                torch.save(learner.adapters(), making / "adapters.pt")
            self._describe(making, about, has_optimiser=stepped)

    def save_sampler(self, folder: Path, about: About) -> None:
        """A model's folder, adapters merged into it."""
        with whole_folder(folder) as making:
            save_model(self.learner.model, self.learner.weights(), making, self.base.settings.model)
            self._describe(making, about, has_optimiser=False)

    def _describe(self, folder: Path, about: About, *, has_optimiser: bool) -> None:
        about = msgspec.structs.replace(about, created=time.time(), has_optimiser=has_optimiser)
        (folder / ABOUT).write_bytes(msgspec.json.encode(about))

    def _restore(self, state: Path, *, optimiser: bool) -> None:
        """Takes up the adapters in `state`, and the optimiser's moments. `CheckpointMismatch` if they don't fit."""
        if (state / "optimiser.pt").exists():
            saved = load_optimiser(Saved(0, 0, state))
            if optimiser:
                self.learner.restore(saved)
                return
            adapters = saved.get("adapters")
        else:
            adapters = torch.load(state / "adapters.pt", weights_only=True) if self.about.rank else None
        if adapters is None:
            return
        try:
            self.learner.take_adapters(adapters)
        except (KeyError, ValueError, RuntimeError) as error:
            raise CheckpointMismatch(f"the saved adapters are not of this model: {error}") from error

    def _pass(
        self, loss: TinkerLoss, config: Config, data: Sequence[Example], *, backward: bool
    ) -> tuple[list[Float32], float]:
        if not data:
            raise InvalidRequest("data: there is none", param="data")
        for number, example in enumerate(data):
            self._check(f"datum {number}", example, loss.inputs)
        rows = [PackedRow.uniform(_unlabelled(one), at, at) for at, one in enumerate(data)]
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
            _spread(logprobs_M.detach().float().cpu().numpy(), pack, data, outputs)
        return outputs, total

    def _check(self, where: str, example: Example, wanted: Sequence[str]) -> None:
        length = len(example.token_ids)
        if not 0 < length <= self.context:
            raise InvalidRequest(f"{where}: model_input has {length} tokens; the model takes 1 to {self.context}")
        if set(example.inputs) != {TARGETS, *wanted}:
            given, needed = ", ".join(example.inputs) or "nothing", ", ".join((TARGETS, *wanted))
            raise InvalidRequest(f"{where}: loss_fn_inputs has {given}; this loss takes {needed}")
        targets = example.inputs[TARGETS]
        for name, ids in (("model_input", example.token_ids), (TARGETS, targets)):
            if not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() >= self.vocabulary:
                raise InvalidRequest(f"{where}: {name} has ids out of the vocabulary of {self.vocabulary}")
        for name in wanted:
            values = example.inputs[name]
            if values.shape != targets.shape:
                shapes = f"{list(values.shape)}, {TARGETS} {list(targets.shape)}"
                raise InvalidRequest(f"{where}: {name} has the shape {shapes}")
            if not np.isfinite(values).all():
                raise InvalidRequest(f"{where}: {name} has values that are not finite")


def batch_of(pack: Pack, examples: Sequence[Example]) -> Batch:
    """The pack's tensors: every target of every token is predicted, whatever it weighs. `extra` is for the loss."""
    parts = [examples[row.number].inputs for row in pack.rows]
    widths = [part[TARGETS].size // len(place) for part, place in zip(parts, pack.places, strict=True)]
    sources = [np.repeat(place, width) for place, width in zip(pack.places, widths, strict=True)]
    extra = {name: _flat([part[name] for part in parts], np.float32) for name in parts[0] if name != TARGETS}
    targets_M = _flat([part[TARGETS] for part in parts], np.int64)
    nothing_M = torch.zeros(len(targets_M))
    return Batch(
        token_ids_N=torch.from_numpy(pack.token_ids_N.astype(np.int64)),
        position_ids_N=torch.from_numpy(pack.position_ids_N.astype(np.int64)),
        spans=pack.spans,
        sources_M=_flat(sources, np.int64),
        targets_M=targets_M,
        logprobs_M=nothing_M,
        versions_M=torch.full_like(targets_M, NO_VERSION),
        advantages_M=nothing_M,
        weights_M=nothing_M,
        rollouts_M=torch.zeros_like(targets_M),
        rows=len(pack.rows),
        unshared_tokens=sum(map(len, pack.rows)),
        extra=extra,
    )


def _spread(logprobs_M: Float32, pack: Pack, examples: Sequence[Example], outputs: list[Float32]) -> None:
    """Puts the pack's log-probs where their examples stand."""
    done = 0
    for row in pack.rows:
        shape = examples[row.number].inputs[TARGETS].shape
        count = math.prod(shape)
        outputs[row.number] = logprobs_M[done : done + count].reshape(shape)
        done += count


def _flat(arrays: Sequence[NDArray[Any]], kind: Any) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays]).astype(kind))


def _unlabelled(example: Example) -> Segment:
    """The example's ids as a segment, which is what is packed."""
    size = len(example.token_ids)
    no_versions = np.full(size, NO_VERSION, np.int32)
    return Segment(example.token_ids, np.zeros(size, bool), np.zeros(size, np.float32), no_versions, ())


def _adam(params: types.AdamParams) -> Mapping[str, Any]:
    values = (params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm)
    sound = all(map(math.isfinite, values)) and min(values) >= 0 and max(params.beta1, params.beta2) < 1
    if not sound:
        raise InvalidRequest(f"no step: AdamParams are {params}; finite ones are wanted, and betas under 1")
    return {
        "lr": params.learning_rate,
        "betas": (params.beta1, params.beta2),
        "eps": params.eps,
        "weight_decay": params.weight_decay,
    }
