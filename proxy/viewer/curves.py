"""Curves as SVG: points that link to their rollouts, and a moving average. No script, no styles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 560.0, 200.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 14.0, 10.0, 24.0
POINTS = 700
"""Maximum points of a curve. More are thinned out, as a curve is 560 wide. The mean uses all."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A value at a position of the x axis. `href` leads to its rollouts."""

    x: float
    y: float
    href: str
    title: str


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A drawn curve. Coordinates are those of the SVG's view box."""

    title: str
    unit: str
    points: Sequence[tuple[float, float, Sample]]
    line: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    last: float


def curve_of(title: str, unit: str, samples: Sequence[Sample], *, x_label: str = "", window: int = 0) -> Curve | None:
    """Returns the curve; None if there is nothing to draw.

    The line is a mean of `window` values, by default of a twelfth of them, up to 32.
    """
    finite_samples = [sample for sample in samples if isfinite(sample.y)]
    if not finite_samples:
        return None
    x_low, x_high = _range([sample.x for sample in finite_samples])
    y_low, y_high = _range([sample.y for sample in finite_samples])

    def place(x: float, y: float) -> tuple[float, float]:
        along = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return round(along, 1), round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    step = ceil(len(finite_samples) / POINTS)
    means = _means(finite_samples, window)
    line = "M" + " L".join(f"{x} {y}" for x, y in (place(*pair) for pair in means))
    return Curve(
        title,
        unit,
        [(*place(sample.x, sample.y), sample) for sample in finite_samples[::step]],
        line,
        [Tick(place(value, y_low)[0], f"{value:g}{x_label}") for value in _ticks(x_low, x_high, 6)],
        [Tick(place(x_low, value)[1], f"{value:g}") for value in _ticks(y_low, y_high, 4)],
        means[-1][1],
    )


def _means(samples: Sequence[Sample], window: int) -> list[tuple[float, float]]:
    """Returns the mean of each value and the values shortly before it."""
    window = window or max(1, min(32, len(samples) // 12))
    pairs, total = [], 0.0
    for index, sample in enumerate(samples):
        total += sample.y - (samples[index - window].y if index >= window else 0.0)
        pairs.append((sample.x, total / min(index + 1, window)))
    return pairs[:: ceil(len(pairs) / 600)] + pairs[-1:]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low - 0.5, high + 0.5) if low == high else (low, high)


def _ticks(low: float, high: float, max_ticks: int) -> list[float]:
    rough = (high - low) / max_ticks
    size = 10 ** floor(log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = ceil(low / step)
    return [round(index * step, 10) for index in range(first, floor(high / step) + 1)]
