"""What a recipe asks models to say of a step's rows, and what they said: networks, heads, views of rows, readings.

Only numpy is needed here. A row array is as long as its segment [L].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rolltap.errors import AlignmentError
from rolltap.types import Float32, Int32, Segment

RowArrays = tuple[Float32, ...]
"""One array [L] a row, in the order of `Step.rows`."""

POLICY = "policy"
"""The policy reading of the weights in training, as they are before the step."""


@dataclass(frozen=True, slots=True)
class ValueHead:
    """A linear map of the policy's last hidden state to one number, read where each trained token is predicted.

    Its loss does not reach the policy unless `moves_policy`. It starts at 0 and is clipped and stepped by itself.
    """

    lr: float = 1e-4
    moves_policy: bool = False


@dataclass(frozen=True, slots=True)
class ReadNetwork:
    """A second model that is only read: that of `folder`, or the run's first one.

    With `decay` it follows the policy and its heads, and is saved: every `every` steps w becomes
    decay w + (1 - decay) policy.
    """

    folder: str = ""
    decay: float | None = None
    every: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class RowView:
    """What a network is shown instead of a row: `segment`, whose trained tokens are `places` of row `row`, in order."""

    segment: Segment
    row: int
    places: Int32

    def __post_init__(self) -> None:
        trained = int(self.segment.loss_mask.sum())
        if trained != len(self.places):
            raise AlignmentError(f"a view of row {self.row} has {trained} trained tokens for {len(self.places)} places")


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One policy reading of the batch before `credit`: which network is shown what. None shows the rows as they are."""

    network: str = POLICY
    views: Sequence[RowView] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPass:
    """One policy reading of the batch before `credit`, by another policy of the server: its engine scores the rows.

    Its model is not in the trainer's memory. `views` as in `Pass`.
    """

    policy: str
    views: Sequence[RowView] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyReading:
    """What one network says of the rows' trained tokens, before the step; 0 elsewhere. `values` are those of heads."""

    logprobs: RowArrays
    entropy: RowArrays
    values: Mapping[str, RowArrays] = field(default_factory=dict)
