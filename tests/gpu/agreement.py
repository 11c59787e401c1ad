"""Log-probs of the engine against the trainer's on the tokens that it sampled, and what each correction makes of it.

The engine samples at temperature 1; the trainer computes the same tokens packed, with shared trunks. Float32 in both is
the control: what differs there is not rounding. The gradient of each correction is held against that of a trainer whose
engine agrees with it exactly (its own log-probs in place of the engine's).
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rolltap.engine.model import CausalModel
from rolltap.engine.sampling import SamplingOptions, SamplingRequest, TokenDelta
from rolltap.engine.scheduler import EngineLoop
from rolltap.trainer_client.data.collate import Batch, collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.loss import Correction, PolicyLoss
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.types import NO_VERSION, Segment

from .shapes import Sizes

CORRECTIONS = {
    "engine": Correction("engine"),
    "truncated, cap 1": Correction("truncated", 1.0),
    "truncated, cap 2": Correction("truncated", 2.0),
}


@dataclass(frozen=True)
class Effect:
    """Of a correction: the share of tokens that the clip cuts, its mean weight, and the cosine and the length of the
    gradient against the one of an engine that agrees."""

    clipped: float
    weight: float
    cosine: float
    norm: float


@dataclass(frozen=True)
class Agreement:
    """`differences` are quantiles of |log pi - log mu| over `tokens`; `mean_ratio` is the mean of pi / mu (1 if mu is
    the distribution that was drawn from); `entropy` in nats says how sharp the model is."""

    model: str
    engine: str
    trainer: str
    tokens: int
    entropy: float
    mean: float
    differences: dict[str, float]
    mean_ratio: float
    effects: dict[str, Effect]


def compare(sizes: Sizes, device: torch.device) -> Iterator[Agreement]:
    with tempfile.TemporaryDirectory() as name:
        folder = sizes.agreement.folder(Path(name), device)
        for dtype in ("float32", "bfloat16"):
            rows = sampled(sizes, folder, getattr(torch, dtype), device)
            try:
                yield _agreement(sizes, folder, rows, dtype, device)
            finally:
                Ranks.of_environment(device.type).leave()
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def sampled(sizes: Sizes, folder: Path, dtype: torch.dtype, device: torch.device) -> list[PackedRow]:
    """Rows that the engine's own loop sampled: the prompts of `sizes.rollouts`, `sizes.sampled` tokens each."""
    model = CausalModel.load(folder, dtype=dtype, device=str(device))
    rollouts, rng = sizes.rollouts, np.random.default_rng(1)
    count = rollouts.groups * rollouts.each
    loop = EngineLoop(model, frozenset(), _deliver, count, rollouts.prompt + sizes.sampled + 1)
    loop.start()
    replies: list[SimpleQueue[TokenDelta]] = [SimpleQueue() for _ in range(count)]
    prompts = np.repeat(rng.integers(0, model.vocabulary, (rollouts.groups, rollouts.prompt)), rollouts.each, axis=0)
    options = SamplingOptions(sizes.sampled, ignore_eos=True)
    loop.submit(
        [
            SamplingRequest(str(at), prompt.tolist(), replace(options, seed=at), replies[at].put, False)
            for at, prompt in enumerate(prompts)
        ]
    ).result()
    deltas = [reply.get(timeout=300) for reply in replies]
    loop.close()
    if any(delta.finish == "error" for delta in deltas):
        raise RuntimeError(f"the engine's loop failed: {loop.failure!r}")
    total = count * sizes.sampled
    return [
        PackedRow.uniform(_segment(prompt, delta), at, at, (-1.0) ** at, 1 / total)
        for at, (prompt, delta) in enumerate(zip(prompts, deltas, strict=True))
    ]


def _deliver(outbox: Sequence[tuple[object, TokenDelta]]) -> None:
    for sink, delta in outbox:
        sink(delta)  # type: ignore[operator]


def _segment(prompt: np.ndarray, delta: TokenDelta) -> Segment:
    mask = np.arange(len(prompt) + len(delta.token_ids)) >= len(prompt)
    return Segment(
        np.concatenate([prompt, delta.token_ids]).astype(np.int32),
        mask,
        np.concatenate([np.zeros(len(prompt)), delta.logprobs]).astype(np.float32),
        np.where(mask, 0, NO_VERSION).astype(np.int32),
        (),
    )


def _agreement(sizes: Sizes, folder: Path, rows: Sequence[PackedRow], dtype: str, device: torch.device) -> Agreement:
    settings = load_trainer_settings(
        key="none", policy="bench", model=folder, out=folder, compute={"device": device.type, "dtype": dtype}
    )
    learner = Learner(folder, settings, Ranks.of_environment(device.type))
    batches = [learner.with_proximal(collate(pack).to(device)) for pack in Packer(sizes.token_budget, share=True)(rows)]
    own = torch.cat([batch.proximal_M for batch in batches if batch.proximal_M is not None])
    apart = own - torch.cat([batch.logprobs_M for batch in batches])
    with torch.no_grad():
        entropy = torch.cat([learner.predict(batch).entropy_M for batch in batches]).mean()
    agreeing = [replace(batch, logprobs_M=batch.proximal_M) for batch in batches if batch.proximal_M is not None]
    ideal, _, _ = _gradient(learner, PolicyLoss(), agreeing)
    effects = {}
    for name, correction in CORRECTIONS.items():
        gradient, clipped, weight = _gradient(learner, PolicyLoss(correction=correction), batches)
        lengths = _dot(ideal, ideal) ** 0.5, _dot(gradient, gradient) ** 0.5
        effects[name] = Effect(
            clipped, weight, _dot(ideal, gradient) / (lengths[0] * lengths[1]), lengths[1] / lengths[0]
        )
    return Agreement(
        sizes.agreement.name,
        dtype,
        dtype,
        len(own),
        float(entropy),
        float(apart.abs().mean()),
        {str(at): float(apart.abs().quantile(at)) for at in (0.5, 0.99, 1.0)},
        float(apart.exp().mean()),
        effects,
    )


def _gradient(learner: Learner, loss: PolicyLoss, batches: Sequence[Batch]) -> tuple[list[Tensor], float, float]:
    """The gradient of a step, the share of its tokens that the clip cuts, and the correction's mean weight."""
    clipped, weights = [], []
    for batch in batches:
        terms = loss(learner.predict(batch), batch)
        learner.backward(terms.loss)
        clipped.append(terms.clipped_M)
        weights.append(terms.correction_M)
    gradient = [
        (weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad).clone()
        for weight in learner.model.parameters()
        if weight.grad is not None
    ]
    learner.forget()
    return gradient, float(torch.cat(clipped).float().mean()), float(torch.cat(weights).float().mean())


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return sum(float(one.flatten().double() @ other.flatten().double()) for one, other in zip(left, right, strict=True))
