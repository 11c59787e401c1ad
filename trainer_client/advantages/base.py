"""What an advantage method is: one number a rollout, from the rewards of its group and its step.

An advantage belongs to a rollout and is shared by all its trained tokens, so it can't depend on how many rows the
rollout's branches yield. Methods see the rewards of scored and of masked rollouts (both are in the baseline, only the
first in the loss) and never those of unscorable ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

EPSILON = 1e-6
"""Added to a standard deviation before it divides, as verl does."""


class AdvantageMethod(Protocol):
    """One file and one line in `ADVANTAGES` a method."""

    def __call__(self, groups: Sequence[Sequence[float]]) -> list[list[float]]:
        """Advantages for the rewards of a step's groups; same shape as `groups`. A group may be empty."""
        ...
