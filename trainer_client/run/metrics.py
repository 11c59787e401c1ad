"""A step's metrics: sums over its trained tokens, one report for each step, and annotations of its calls.

The measure of fidelity is `mismatch`: the mean |log trainer/engine| by how many versions a token is behind. For tokens
sampled by the weights in training (`mismatch_mean`, `_max`, `_share`) it is only rounding; if it grows, engine and
trainer compute different things. For older tokens it includes the change of the policy since then. It is measured
before the first update, which is not made if the mean of any age exceeds `report.mismatch_stop`. A metric that was not
measured is None, never 0.

Annotations of calls are computed in the step's first update, while the weights are still those of the step's version.
With several minibatches, only the first one's calls have annotations. Tokens that are not trained have no value.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rolltap.contract.trainer import CallAnnotation, LeasedGroup
from rolltap.trainer_client.data.collate import Batch
from rolltap.trainer_client.data.packing import Pack, PackedRow
from rolltap.trainer_client.data.recorded import ExpertShape
from rolltap.trainer_client.data.scoring import baseline, has_loss, informative
from rolltap.trainer_client.model.learner import Readout
from rolltap.trainer_client.model.loss import Terms
from rolltap.trainer_client.model.network import Predictions
from rolltap.types import NO_VERSION, Float32, Scoring

SUMS = ("tokens", "entropy", "kl", "kl_tokens", "correction", "mismatch_over", "clipped", "updates_tokens")
PEAKS = ("log_ratio_max", "mismatch_max")
AGES = 9
"""The number of age classes of tokens: versions behind. The last class holds all older tokens."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of one step: a line of metrics.jsonl, and the input of every sink.

    `attempt` grows with each start of the run: a step repeated after a restart has a greater one. `updates_skipped` of
    the step's `updates` had a gradient that is not finite (in the first update, that ends the step instead).

    `tokens` were computed, `shared_tokens` were saved by prefix sharing, and `trained_tokens` carry loss;
    `unrouted_tokens` of them have no recorded experts. `staleness` counts groups by how many versions their oldest
    trained token was behind. `seconds` splits the step's time. Of `groups`, those without variance have equal rewards,
    and in those without loss every reply is masked. `groups_dropped` (without loss) and `rollouts_unanswered` (no model
    answered) count from the start of the run.

    `reward` and all counts of rollouts and groups are of what the policy has just done: the step's `groups_replayed`
    earlier ones, which a recipe may choose for their successes, are counted only there and in `staleness`.
    """

    step: int
    attempt: int
    version: int
    reward: float | None
    rollouts: int
    masked: int
    unscorable: int
    groups: int
    groups_without_variance: int
    groups_without_loss: int
    groups_replayed: int
    groups_dropped: int
    rollouts_unanswered: int
    advantage_abs: float | None
    rows: int
    tokens: int
    shared_tokens: int
    trained_tokens: int
    unrouted_tokens: int
    loss: float | None
    entropy: float | None
    kl: float | None
    clip_fraction: float | None
    correction: float | None
    log_ratio_max: float | None
    mismatch_mean: float | None
    mismatch_max: float | None
    mismatch_share: float | None
    grad_norm: float | None
    lr: float | None
    updates: int
    updates_skipped: int
    tokens_per_second: float
    staleness: dict[int, int] = field(default_factory=dict)
    mismatch: dict[int, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def flat(self) -> dict[str, float]:
        """Every number by name, nested ones as `staleness/1` or `seconds/wait`; metrics that are None are left out."""
        values: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                values.update({f"{name}/{key}": float(one) for key, one in value.items()})
            elif value is not None:
                values[name] = float(value)
        return values


class Clock:
    """Measures the parts of a step, in seconds. On CUDA a part ends when the device has finished its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] += time.perf_counter() - started


class StepMetrics:
    """Sums and peaks over the trained tokens of a step, kept on the device until they are read."""

    def __init__(self, device: torch.device, version: int, threshold: float) -> None:
        self._version = version
        self._threshold = threshold
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=device)
        self.peaks = torch.zeros(len(PEAKS), dtype=torch.float64, device=device)
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.drift = torch.zeros(2, AGES, dtype=torch.float64, device=device)  # sums of |log ratio| by age, and counts

    @torch.no_grad()
    def add(self, predicted: Predictions, batch: Batch, terms: Terms, *, first: bool) -> None:
        """Counts a batch; entropy and mismatch in the step's `first` update only."""
        if not batch.trained_tokens:
            return
        sums: dict[str, Tensor | float] = {
            "clipped": terms.clipped_M.sum(),
            "correction": terms.correction_M.sum(),
            "updates_tokens": float(batch.trained_tokens),
        }
        peaks = [terms.log_ratio_M.abs().max()]
        if terms.kl_M is not None:
            sums |= {"kl": terms.kl_M.sum(), "kl_tokens": float(batch.trained_tokens)}
        if first:
            drift_M = (predicted.logprobs_M - batch.logprobs_M).abs()
            ages_M = (self._version - batch.versions_M).clamp(max=AGES - 1)
            ages_M = torch.where(ages_M < 0, AGES - 1, ages_M)  # sampled by versions that a rewind abandoned
            self.drift[0].index_add_(0, ages_M, drift_M.double())
            self.drift[1].index_add_(0, ages_M, torch.ones_like(drift_M, dtype=torch.float64))
            fresh_M = drift_M * (ages_M == 0)
            peaks.append(fresh_M.max())
            sums |= {
                "tokens": float(batch.trained_tokens),
                "entropy": predicted.entropy_M.sum(),
                "mismatch_over": (fresh_M > self._threshold).sum(),
            }
            self.loss += terms.loss
        for name, value in sums.items():
            self.sums[SUMS.index(name)] += value
        for index, peak in enumerate(peaks):
            self.peaks[index] = torch.maximum(self.peaks[index], peak.double())

    def read(self) -> dict[str, Any]:
        """Means and shares by the names of `StepReport`."""
        sums = dict[str, float](zip(SUMS, self.sums.tolist(), strict=True))
        peaks = dict(zip(PEAKS, self.peaks.tolist(), strict=True))
        means = {age: drift / count for age, (drift, count) in enumerate(self.drift.T.tolist()) if count}
        fresh = float(self.drift[1, 0])

        def mean(name: str, over: str) -> float | None:
            return sums[name] / sums[over] if sums[over] else None

        return {
            "loss": float(self.loss) if sums["tokens"] else None,
            "entropy": mean("entropy", "tokens"),
            "kl": mean("kl", "kl_tokens"),
            "clip_fraction": mean("clipped", "updates_tokens"),
            "correction": mean("correction", "updates_tokens"),
            "log_ratio_max": peaks["log_ratio_max"] if sums["updates_tokens"] else None,
            "mismatch": means,
            "mismatch_mean": means.get(0),
            "mismatch_max": peaks["mismatch_max"] if fresh else None,
            "mismatch_share": sums["mismatch_over"] / fresh if fresh else None,
        }


def describe_groups(groups: Sequence[LeasedGroup]) -> dict[str, Any]:
    """The metrics of a step's groups, by the names of `StepReport`."""
    fresh = [group for group in groups if not group.replay]
    rewards = [record.reward for group in fresh for record in baseline(group) if record.reward is not None]
    scorings = Counter(record.rollout.scoring for group in fresh for record in group.rollouts)
    behind = Counter(group.staleness for group in groups if group.oldest_version != NO_VERSION)
    return {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "rollouts": len(rewards),
        "masked": scorings[Scoring.MASKED],
        "unscorable": scorings[Scoring.UNSCORABLE],
        "groups": len(fresh),
        "groups_without_variance": sum(not informative(group) for group in fresh),
        "groups_without_loss": sum(not has_loss(group) for group in fresh),
        "groups_replayed": len(groups) - len(fresh),
        "staleness": dict(sorted(behind.items())),
    }


def describe_rows(rows: Sequence[PackedRow], experts: ExpertShape | None = None) -> dict[str, Any]:
    """The metrics of a step's rows in the loss, by the names of `StepReport`; `experts`: the mixture, if replayed."""
    replays = experts is not None and experts.layers
    weighed = [np.abs(row.advantages[row.segment.loss_mask & (row.weights > 0)]) for row in rows]
    tokens = sum(map(len, weighed))
    return {
        "advantage_abs": float(sum(one.sum() for one in weighed)) / tokens if tokens else None,
        "trained_tokens": tokens,
        "unrouted_tokens": sum(experts.unrouted(row.segment) for row in rows) if experts and replays else 0,
        "rows": len(rows),
    }


CLIPPED = "clipped"
"""Key in `Readout.values`: where the clip cuts the gradient."""

DIGITS = 5
STREAMS = ("logprobs", "entropy", CLIPPED)


def call_annotations(packs: Sequence[Pack], readouts: Sequence[Readout]) -> list[CallAnnotation]:
    """The annotation of each call with trained tokens in the packs. Each readout has the trained tokens of its pack."""
    streams: dict[str, dict[str, Float32]] = {}
    for pack, readout in zip(packs, readouts, strict=True):
        start = 0
        for row in pack.rows:
            mask = row.segment.loss_mask
            end = start + int(mask.sum())
            for name, values in zip(STREAMS, (readout.logprobs, readout.entropy, readout.values[CLIPPED]), strict=True):
                spread = np.full(len(mask), np.nan, np.float32)
                spread[mask] = values[start:end]
                for turn in row.segment.turns:
                    own = spread[turn.start : turn.end]
                    if mask[turn.start : turn.end].any():
                        stream = streams.setdefault(turn.call_id, {}).setdefault(name, np.full_like(own, np.nan))
                        np.copyto(stream, own, where=~np.isnan(own))
            start = end
    return [
        CallAnnotation(
            call_id,
            logprobs=_numbers(np.minimum(of["logprobs"], 0)),
            entropy=_numbers(np.maximum(of["entropy"], 0)),
            clipped=[None if value is None else bool(value) for value in _numbers(of[CLIPPED])],
        )
        for call_id, of in streams.items()
    ]


def _numbers(values: Float32) -> list[float | None]:
    return [None if value != value else round(value, DIGITS) for value in values.tolist()]
