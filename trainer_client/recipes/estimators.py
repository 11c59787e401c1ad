"""The arithmetic that recipes share: numbers [X] of a column, with keys [X] that say which belong together.

Standard deviations are the sample's (ddof 1) unless `ddof` says otherwise; a key of one member has spread 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rolltap.contract.trainer import EQUAL_WITHIN, LEAST_SIZE

Numbers = NDArray[Any]
EPSILON = 1e-6
"""Added to a standard deviation before it divides, as verl does."""


def keyed(*columns: Iterable[Hashable]) -> NDArray[np.int64]:
    """Keys of what is equal in all columns: keyed([0, 0, 1], "aab") → [0, 0, 1]."""
    numbers: dict[tuple[Any, ...], int] = {}
    return np.array([numbers.setdefault(one, len(numbers)) for one in zip(*columns, strict=True)], np.int64)


def mean(values: Numbers, keys: NDArray[np.int64]) -> Numbers:
    """Each key's mean, at its members: [1, 0, 4] by [0, 0, 1] → [.5, .5, 4]."""
    return (np.bincount(keys, values) / np.maximum(np.bincount(keys), 1))[keys]


def centre(values: Numbers, keys: NDArray[np.int64]) -> Numbers:
    """What is left of the key's mean: [1, 0, 0, 1] of one key → [.5, -.5, -.5, .5]. Equal values give exactly 0."""
    average = mean(values, keys)
    return np.where(
        np.abs(values - average) <= EQUAL_WITHIN * np.maximum(np.abs(average), LEAST_SIZE), 0.0, values - average
    )


def spread(values: Numbers, keys: NDArray[np.int64], ddof: int = 1) -> Numbers:
    """Each key's standard deviation, at its members: [1, 0, 0, 1] of one key → .5774."""
    squares = np.bincount(keys, centre(values, keys) ** 2) / np.maximum(np.bincount(keys) - ddof, 1)
    return np.sqrt(squares)[keys]


def normalise(values: Numbers, keys: NDArray[np.int64], ddof: int = 1) -> Numbers:
    """(value - mean) / (spread + 1e-6) within the key: [1, 0, 0, 1] of one key → ±.866."""
    return centre(values, keys) / (spread(values, keys, ddof) + EPSILON)


def against_others(values: Numbers, keys: NDArray[np.int64]) -> Numbers:
    """The value less the mean of the key's others; alone: 0. [1, 0, 0, 1] of one key → ±.6667."""
    sizes = np.bincount(keys)[keys]
    return centre(values, keys) * sizes / np.maximum(sizes - 1, 1)


def whiten(values: Numbers, ddof: int = 1) -> Numbers:
    """All values as one key: [1, 2, 3] → [-1, 0, 1]."""
    return normalise(values, np.zeros(len(values), np.int64), ddof)


def whiten_rows(rows: Sequence[Numbers], masks: Sequence[NDArray[np.bool_]]) -> list[Numbers]:
    """The masked values of all rows as one key, and 0 elsewhere: [1, 9], [2, 3] without the 9 → [-1, 0], [0, 1]."""
    flat, inside = np.concatenate([np.zeros(0), *rows]), np.concatenate([np.zeros(0, bool), *masks])
    whitened = np.zeros(len(flat))
    whitened[inside] = whiten(flat[inside])
    return np.split(whitened, np.cumsum([len(row) for row in rows], dtype=int))[:-1]


def discounted(rewards: Numbers, gamma: float = 1.0) -> Numbers:
    """Returns-to-go of one sequence: [0, 0, 1] with gamma .9 → [.81, .9, 1]."""
    sums = np.zeros(len(rewards))
    running = 0.0
    for index in reversed(range(len(rewards))):
        running = sums[index] = rewards[index] + gamma * running
    return sums


def returns(rewards: Numbers, sequences: Sequence[Sequence[int]], gamma: float = 1.0) -> Numbers:
    """`discounted` along each sequence of numbers into `rewards`."""
    sums = np.zeros(len(rewards))
    for sequence in sequences:
        sums[list(sequence)] = discounted(rewards[list(sequence)], gamma)
    return sums


def gae(rewards: Numbers, values: Numbers, gamma: float, lam: float, last: float = 0.0) -> Numbers:
    """Generalised advantages of one sequence (Schulman et al. 2016, eq. 16); `last` is the value after its end.

    r [0, 0, 1], V [.2, .5, .6], gamma 1, lam .95 → [.756, .48, .4].
    """
    advantages = np.zeros(len(rewards))
    running, following = 0.0, last
    for index in reversed(range(len(rewards))):
        running = rewards[index] + gamma * following - values[index] + gamma * lam * running
        advantages[index], following = running, values[index]
    return advantages
