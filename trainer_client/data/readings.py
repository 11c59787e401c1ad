"""Readings: which networks and heads a recipe evaluates on a step's rows before the step, and the results.

Needs only numpy. A row array is as long as its segment [L].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolltap.errors import AlignmentError
from rolltap.types import Float32, Int32, Segment

RowArrays = tuple[Float32, ...]
"""One array [L] for each row, in the order of `Step.rows`."""

POLICY = "policy"
"""Name of the network in training, with its weights from before the step."""


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A linear map of the policy's last hidden state to one number, read where each trained token is predicted.

    Its loss has no gradient in the policy unless `moves_policy`. It starts at 0, and its gradient is clipped apart from
    the policy's, at its own learning rate `lr`.
    """

    lr: float = 1e-4
    moves_policy: bool = False


@dataclass(frozen=True, slots=True)
class ReadNetwork:
    """A second model that is read and not trained: the one in `folder`, or the run's initial model.

    With `decay` it is an exponential moving average of the policy and its heads, and is saved with checkpoints: every
    `every` steps w becomes decay w + (1 - decay) policy.
    """

    folder: str = ""
    decay: float | None = None
    every: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class RowView:
    """A segment that a network reads in place of row `row`. Its trained tokens are those at `places` of the row."""

    segment: Segment
    row: int
    places: Int32

    def __post_init__(self) -> None:
        trained = int(self.segment.loss_mask.sum())
        if trained != len(self.places):
            raise AlignmentError(f"a view of row {self.row} has {trained} trained tokens for {len(self.places)} places")


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A reading before `credit`: `network` reads `views`. None: the rows as they are."""

    network: str = POLICY
    views: Sequence[RowView] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPass:
    """A reading before `credit` by another policy of the server: that policy's engine scores the rows.

    The trainer does not load its model. `views` as in `Pass`.
    """

    policy: str
    views: Sequence[RowView] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyReading:
    """A network's outputs at the rows' trained tokens, before the step; 0 elsewhere. `values`: by head."""

    logprobs: RowArrays
    entropy: RowArrays
    values: Mapping[str, RowArrays] = field(default_factory=dict)
