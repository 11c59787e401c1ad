"""A run's page: its curves by group, and the engines that serve its policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from rolltap.proxy.viewer.curves import Curve, Sample, curve_of
from rolltap.reading.types import GroupEffort, RunPoint


@dataclass(frozen=True, slots=True)
class EngineLine:
    """An engine, or a replica of one. `version` is None if it does not say which weights it holds."""

    name: str
    state: str
    version: int | None


def run_curves(points: Sequence[RunPoint], efforts: Mapping[str, GroupEffort]) -> list[Curve]:
    """Returns the curves. A point is a group, in order of completion; groups without a reward are left out."""
    rewarded_points = [point for point in points if point.reward_mean is not None]
    hrefs = [f"/view/groups/{quote(point.group_id, safe='')}" for point in rewarded_points]

    def curve(title: str, unit: str, values: Sequence[float | None], window: int = 0) -> Curve | None:
        samples = [
            Sample(index, value, href, f"group {point.group_id}: {value:g}")
            for index, (point, href, value) in enumerate(zip(rewarded_points, hrefs, values, strict=True), 1)
            if value is not None
        ]
        return curve_of(title, unit, samples, window=window)

    group_efforts = [efforts.get(point.group_id) for point in rewarded_points]
    curves = [
        curve("Reward", "mean of a group", [point.reward_mean for point in rewarded_points]),
        curve("Length", "tokens sampled a rollout", [e and e.output_tokens / e.sessions for e in group_efforts]),
        curve("Calls", "a rollout", [e and e.calls / e.sessions for e in group_efforts]),
        curve("Speed", "sampled tokens a second", [e and _speed(e) for e in group_efforts]),
        curve("Staleness", "weight versions within a group", [_number(point.staleness) for point in rewarded_points]),
        curve("Mismatch", "mean |log(trainer / engine)|", [point.mismatch for point in rewarded_points]),
        curve(
            "Weight version",
            "newest of a group",
            [_number(point.newest_version) for point in rewarded_points],
            window=1,
        ),
    ]
    return [each for each in curves if each is not None]


def _speed(effort: GroupEffort) -> float | None:
    seconds = effort.last_call_at - effort.first_call_at
    return effort.output_tokens / seconds if seconds > 0 else None


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)
