"""95% intervals of a share and of differences between two means, for few samples.

Shares (all values 0 or 1) use Newcombe's hybrid of Wilson's score intervals (Statistics in Medicine 17, 1998, method
10), which stay valid at 0 of 4 and 4 of 4. Other values use Welch's t, paired differences Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

Z = NormalDist().inv_cdf(0.975)

FEW = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Student's 97.5% quantiles for few degrees of freedom."""

Interval = tuple[float, float]


def difference(first: Sequence[float], second: Sequence[float]) -> Interval | None:
    """Returns the interval of the mean of `second` minus the mean of `first`; None with too few values."""
    if first and second and all(value in (0, 1) for value in (*first, *second)):
        return _newcombe(first, second)
    if len(first) < 2 or len(second) < 2:
        return None
    shares = [variance(values) / len(values) for values in (first, second)]
    middle, spread = fmean(second) - fmean(first), math.sqrt(sum(shares))
    if spread == 0:
        return None  # no variance on either side: so few values can't tell how others vary
    freedom = sum(shares) ** 2 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (first, second), strict=True)
    )
    reach = student(freedom) * spread
    return middle - reach, middle + reach


def paired(differences: Sequence[float]) -> Interval | None:
    """Returns the interval of the mean of differences; None for fewer than two, and for equal ones: so few values can't
    tell how others vary."""
    if len(differences) < 2 or len(set(differences)) == 1:
        return None
    reach = student(len(differences) - 1) * math.sqrt(variance(differences) / len(differences))
    return fmean(differences) - reach, fmean(differences) + reach


def student(freedom: float) -> float:
    """Returns the 97.5% quantile of Student's t; over 4 degrees of freedom by the Cornish-Fisher expansion. Fractions
    are rounded down."""
    n = max(1, math.floor(freedom))
    if n in FEW:
        return FEW[n]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / n + second / n**2 + third / n**3


def _newcombe(first: Sequence[float], second: Sequence[float]) -> Interval:
    before, after = fmean(first), fmean(second)
    (low_1, high_1), (low_2, high_2) = wilson(before, len(first)), wilson(after, len(second))
    middle = after - before
    return (
        middle - math.hypot(after - low_2, high_1 - before),
        middle + math.hypot(high_2 - after, before - low_1),
    )


def wilson(share: float, count: int) -> Interval:
    """Returns the score interval of a share of `count` independent samples (Wilson 1927, eq. 4)."""
    middle = share + Z**2 / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    low, high = (middle - reach) / (1 + Z**2 / count), (middle + reach) / (1 + Z**2 / count)
    return max(0.0, low), min(1.0, high)
