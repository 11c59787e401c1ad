"""A run's page: its curves by group, and the engines that serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from rolltap.proxy.viewer.curves import Curve, Sample, curve_of
from rolltap.reading.types import GroupEffort, RunPoint


@dataclass(frozen=True, slots=True)
class EngineLine:
    """A replica of an engine. `version` is None where the engine does not say which weights it holds."""

    name: str
    state: str
    version: int | None


def run_curves(points: Sequence[RunPoint], efforts: Mapping[str, GroupEffort]) -> list[Curve]:
    """A point is a group, in the order in which they completed; those without a reward are left out."""
    ended = [point for point in points if point.reward_mean is not None]
    hrefs = [f"/view/groups/{quote(point.group_id, safe='')}" for point in ended]

    def curve(title: str, unit: str, values: Sequence[float | None], window: int = 0) -> Curve | None:
        samples = [
            Sample(index, value, href, f"group {point.group_id}: {value:g}")
            for index, (point, href, value) in enumerate(zip(ended, hrefs, values, strict=True), 1)
            if value is not None
        ]
        return curve_of(title, unit, samples, window=window)

    took = [efforts.get(point.group_id) for point in ended]
    curves = [
        curve("Reward", "mean of a group", [point.reward_mean for point in ended]),
        curve("Length", "tokens sampled a rollout", [each and each.output_tokens / each.sessions for each in took]),
        curve("Calls", "a rollout", [each and each.calls / each.sessions for each in took]),
        curve("Speed", "sampled tokens a second", [each and _speed(each) for each in took]),
        curve("Staleness", "weight versions within a group", [_number(point.staleness) for point in ended]),
        curve("Mismatch", "mean |log(trainer / engine)|", [point.mismatch for point in ended]),
        curve("Weight version", "newest of a group", [_number(point.newest_version) for point in ended], window=1),
    ]
    return [each for each in curves if each is not None]


def _speed(effort: GroupEffort) -> float | None:
    seconds = effort.last_call_at - effort.first_call_at
    return effort.output_tokens / seconds if seconds > 0 else None


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)
