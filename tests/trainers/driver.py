"""What the contract suite asks of an adapter's driver: to run its trainer, and to show what its loss was given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

EVERYTHING = frozenset({"tokens", "gradient", "order", "killed", "lost", "refused", "tokenizer", "staleness"})

CLIP = (0.1, 0.15)
"""How far below and above 1 a loss clips ratios; a driver whose trainer doesn't has a `clip` of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedToken:
    """A token in the trainer's loss, by what preceded it: `context` ends before it."""

    context: tuple[int, ...]
    token: int
    logprob: float


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a trainer is run with. `die_at` is the step whose optimiser is killed after the acknowledgement."""

    url: str
    model: Path
    out: Path
    steps: int
    groups: int = 2
    die_at: int | None = None


@dataclass(slots=True, eq=False)
class Seen:
    """What a run showed: the tokens in each step's loss, the first step's gradient, what it logged."""

    tokens: list[list[TrainedToken]]
    gradient: Mapping[str, torch.Tensor]
    logged: Mapping[str, list[float]]


class Driver(Protocol):
    """One trainer, run for real on a CPU. `normalise` is the mean its loss takes, in our trainer's words."""

    spends_steps: bool  # a step whose groups were lost counts, and changes nothing
    normalise: str
    advantage: str

    def run(self, run: Run) -> Seen: ...


class Killed(BaseException):
    """Stands for SIGKILL within a test's process: nothing of the trainer's catches it."""


class DyingSGD(torch.optim.SGD):
    """Plain SGD that notes the first step's gradient, and dies in a chosen step before it changes anything."""

    def __init__(self, model: torch.nn.Module, die_at: int | None, done: int = 0) -> None:
        super().__init__(model.parameters(), lr=1e-2)
        self.named = dict(model.named_parameters())
        self.gradient: dict[str, torch.Tensor] = {}
        self.dies_in = None if die_at is None else die_at - done

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        if not self.gradient:
            self.gradient = {n: w.grad.clone() for n, w in self.named.items() if w.grad is not None}
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in == 0:
                raise Killed
        super().step()


def tokens_of(ids: np.ndarray, mask: np.ndarray, logprobs: np.ndarray) -> list[TrainedToken]:
    """The trained tokens of one row."""
    return [TrainedToken(tuple(ids[:at].tolist()), int(ids[at]), float(logprobs[at])) for at in np.flatnonzero(mask)]
