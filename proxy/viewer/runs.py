"""Values for the pages of runs, comparisons and groups: charts, the trainer's steps, a group's rollouts as lanes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rolltap.proxy.viewer.session import ShownTurn
from rolltap.reading.types import (
    GroupDetail,
    GroupEffort,
    Interval,
    MessageView,
    RolloutDetail,
    RunPoint,
    TrainerStep,
    VersionComparison,
)

MOST_RUNS = 6
"""Runs that are laid over each other; more colours can't be told apart."""


@dataclass(frozen=True, slots=True)
class EngineLine:
    """An engine, or a replica of one. `version` is None if it does not say which weights it holds."""

    name: str
    state: str
    version: int | None


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. `of`: its values belong to a "group" or a "step". `log`: its axis is logarithmic."""

    name: str
    title: str
    unit: str
    of: str = "group"
    log: bool = False


def groups_by_state(counts: Sequence[tuple[str, str, bool, int]]) -> dict[str, int]:
    """How many groups are in each state, of `RecordReader.group_counts`. Evaluations are measured, not dropped."""
    by_state: Counter[str] = Counter()
    for _, status, measures, count in counts:
        by_state["measured" if measures and status == "dropped" else status] += count
    return dict(sorted(by_state.items()))


CHARTS = (
    Chart("reward", "Reward", "mean of a group"),
    Chart("entropy", "Entropy", "of a step, per token", "step"),
    Chart("kl", "KL", "of a step, to the reference", "step"),
    Chart("loss", "Loss", "of a step", "step"),
    Chart("grad_norm", "Gradient norm", "of a step", "step", log=True),
    Chart("mismatch_mean", "Trainer's mismatch", "mean of a step", "step", log=True),
    Chart("clip_fraction", "Clipped", "share of a step's tokens", "step"),
    Chart("mismatch", "Mismatch", "mean |log(trainer / engine)|"),
    Chart("length", "Length", "tokens sampled a rollout"),
    Chart("calls", "Calls", "a rollout"),
    Chart("speed", "Speed", "sampled tokens a second"),
    Chart("staleness", "Staleness", "weight versions within a group"),
    Chart("version", "Weight version", "newest of a group"),
)
"""In the order of the page: the reward, and beside it what its trainer says."""

OF_STEPS = tuple(chart.name for chart in CHARTS if chart.of == "step")


@dataclass(frozen=True, slots=True)
class Run:
    """The data of a policy's charts."""

    policy: str
    points: Sequence[RunPoint]
    efforts: Mapping[str, GroupEffort]
    steps: Sequence[TrainerStep]


def chart_data(runs: Sequence[Run], *, links: bool) -> dict[str, Any]:
    """Returns the data of the charts that have values, as JSON. `links`: points lead to their groups."""
    series = [_series(run) for run in runs]
    shown = [
        chart
        for chart in CHARTS
        if any(value is not None for one in series for value in one[f"{chart.of}s"][chart.name])
    ]
    return {
        "links": links,
        "runs": series,
        "charts": [
            {"name": chart.name, "title": chart.title, "unit": chart.unit, "of": chart.of, "log": chart.log}
            for chart in shown
        ],
    }


def last_values(data: Mapping[str, Any]) -> list[tuple[str, str, int]]:
    """Returns title, last value and number of values of each chart of the first run, for those who see no chart."""
    told = []
    for chart in data["charts"]:
        values = [value for value in data["runs"][0][f"{chart['of']}s"][chart["name"]] if value is not None]
        told.append((f"{chart['title']}, {chart['unit']}", f"{values[-1]:.3g}" if values else "none", len(values)))
    return told


def _series(run: Run) -> dict[str, Any]:
    """Groups without a reward are left out. Times are hours since the run's first group."""
    points = [point for point in run.points if point.reward_mean is not None]
    efforts = [run.efforts.get(point.group_id) for point in points]
    began = points[0].at if points else 0.0
    return {
        "name": run.policy,
        "groups": {
            "id": [point.group_id for point in points],
            "hours": [_rounded((point.at - began) / 3600) for point in points],
            "step": [point.step for point in points],
            "evaluation": [int(point.evaluation) for point in points],
            "reward": [_rounded(point.reward_mean) for point in points],
            "length": [_rounded(each.output_tokens / each.sessions) if each else None for each in efforts],
            "calls": [_rounded(each.calls / each.sessions) if each else None for each in efforts],
            "speed": [_rounded(_speed(each)) if each else None for each in efforts],
            "staleness": [point.staleness for point in points],
            "mismatch": [_rounded(point.mismatch) for point in points],
            "version": [point.newest_version for point in points],
        },
        "steps": {
            "step": [each.step for each in run.steps],
            **{name: [_rounded(each.values.get(name)) for each in run.steps] for name in ("version", *OF_STEPS)},
        },
    }


def _rounded(value: float | None) -> float | None:
    """Returns the value with six digits, which no chart tells from more; None for what can't be drawn."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _speed(effort: GroupEffort) -> float | None:
    seconds = effort.last_call_at - effort.first_call_at
    return effort.output_tokens / seconds if seconds > 0 else None


def reach_of(comparison: VersionComparison) -> float:
    """Returns the largest distance from 0 of all intervals and differences: the scale of the drawing."""
    ends = [abs(end) for task in comparison.tasks for end in (*(task.interval or ()), task.difference)]
    return max(ends, default=0.0) or 1.0


def tone(difference: float, interval: Interval | None) -> str:
    """Returns "better" or "worse" if the interval does not contain 0, else ""."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return ""
    return "better" if difference > 0 else "worse"


SHOWN = 30
"""Maximum calls of a rollout in its lane."""


@dataclass(frozen=True, slots=True)
class RolloutLane:
    """A rollout's turns. `parts_at`: index of the first turn whose text differs between two lanes, -1 without one.

    `more`: number of turns that are not shown.
    """

    detail: RolloutDetail
    turns: Sequence[ShownTurn]
    parts_at: int
    more: int


def forks_of(group: GroupDetail) -> list[tuple[int, RolloutDetail]]:
    """Returns the rollouts as a tree, each behind its parent, with its depth; empty if none was forked."""
    if not any(each.rollout.parent for each in group.rollouts):
        return []
    ids = {each.rollout.id for each in group.rollouts}
    children: dict[str, list[RolloutDetail]] = {}
    for each in sorted(group.rollouts, key=lambda each: each.rollout.index, reverse=True):
        parent = each.rollout.parent
        inside = parent is not None and parent.rollout_id in ids
        children.setdefault(parent.rollout_id if parent is not None and inside else "", []).append(each)
    tree: list[tuple[int, RolloutDetail]] = []
    waiting = [(0, each) for each in children.get("", ())]
    while waiting:
        depth, each = waiting.pop()
        tree.append((depth, each))
        waiting += [(depth + 1, child) for child in children.get(each.rollout.id, ())]
    return tree


def lanes_of(group: GroupDetail, turns: Sequence[Sequence[ShownTurn]]) -> list[RolloutLane]:
    """Returns the lanes in the group's order. The requests of the first turns are the task, which all lanes share."""
    longest = max(map(len, turns), default=0)
    differing = (i for i in range(longest) if len({_compared_content(lane[i]) for lane in turns if i < len(lane)}) > 1)
    parts_at = next(differing, -1)
    return [
        RolloutLane(detail, members[:SHOWN], parts_at, max(0, len(members) - SHOWN))
        for detail, members in zip(group.rollouts, turns, strict=True)
    ]


def _compared_content(turn: ShownTurn) -> tuple[object, ...]:
    messages: tuple[MessageView | None, ...] = (*(turn.new if turn.entry.number > 1 else ()), turn.reply)
    return tuple(
        (message.role, tuple((part.kind, part.name, part.text) for part in message.parts))
        for message in messages
        if message is not None
    )


def spread(rewards: Sequence[float | None]) -> str:
    """Renders a group's rewards as a row of marks, best first: full, half and empty ones, a dash for none."""
    numbers = sorted((reward for reward in rewards if reward is not None), reverse=True)
    low, high = min([0.0, *numbers]), max([1.0, *numbers])
    marks = ["○◔◑◕●"[round((reward - low) / (high - low) * 4)] for reward in numbers]
    return "".join(marks) + "–" * (len(rewards) - len(numbers))
