"""What a trainer sets for the rollouts of its policy that are still to come, and a policy's status with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from rolltap.contract.admin import MAX_ROLLOUTS
from rolltap.contract.base import Integer, RequestBody
from rolltap.contract.rules import NO_RULES, SessionRules
from rolltap.contract.trainer import OwnerRequest, PolicyState
from rolltap.errors import InvalidRequest

OTHERS = "*"
"""In a curriculum: every task that none of its names names."""

MOST_TURNS = 2**31 - 1
TEMPERATURES = (0.1, 2.0)
"""The lowest and the highest. Below, engines clamp (vLLM at 0.01), and a small error of a logit is a large one of a
ratio."""
PRIORITIES = 1_000_000
"""The largest change of a priority, up or down."""
MOST_NAMES = 64
NAME_CHARS = 256
WEIGHTS = (1e-6, 1e6)


class RolloutControl(RequestBody, frozen=True):
    """Replaces all that was set before: a field that is left out is not set, and the task's or policy's own holds.

    An attempt that begins from now on has

    * `max_turns`: at most as many turns, or the task's own cap if that is lower;
    * `temperature`: the one at which the policy samples every call of the attempt, over the policy's settings;
    * `rules`: these rules behind the task's own (`rolltap.contract.rules.SessionRules`); those of a role that it does
      not have are left out.

    A group that is opened from the queue from now on

    * has `n` rollouts, unless its rule could not be met with so many: then it keeps the submission's own number;
    * has the submission's priority plus `priority`, by which tasks are opened, run and trained;
    * is of a task that the `curriculum` drew: a map from a task's id, or one of its tags, to a weight. Of the queued
      tasks with the highest priority, a name is drawn by its weight among those that some task has, and the longest
      queued task of that name is opened. `*` names the tasks that nothing else names; without it they wait.

    What runs already and groups that are open keep what they have. Groups for evaluation (`purpose=eval`) follow no
    control, and groups that a runner opens itself are the size that it asks for.
    """

    max_turns: Integer | None = None
    temperature: float | None = None
    n: Integer | None = None
    priority: Integer | None = None
    curriculum: dict[str, float] = msgspec.field(default_factory=dict)
    rules: SessionRules = NO_RULES

    def __post_init__(self) -> None:
        _check_between("max_turns", self.max_turns, 1, MOST_TURNS)
        _check_between("temperature", self.temperature, *TEMPERATURES)
        _check_between("n", self.n, 1, MAX_ROLLOUTS)
        _check_between("priority", self.priority, -PRIORITIES, PRIORITIES)
        _check_curriculum(self.curriculum)
        self.rules.tags()


def is_task_name(name: str) -> bool:
    """Whether a curriculum may name it."""
    return 1 <= len(name) <= NAME_CHARS and name.isprintable()


def _check_between(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:  # NaN is refused, too
        raise InvalidRequest(f"{name} is {least:,} to {most:,}, not {value}", param=name)


def _check_curriculum(weights: Mapping[str, float]) -> None:
    if len(weights) > MOST_NAMES:
        raise InvalidRequest(f"curriculum: at most {MOST_NAMES} names, not {len(weights)}", param="curriculum")
    for name, weight in weights.items():
        if not is_task_name(name):
            raise InvalidRequest(
                f"curriculum: {name[:80]!r} is neither a task's id nor a tag: 1 to {NAME_CHARS} printable characters",
                param="curriculum",
            )
        if not math.isfinite(weight) or not WEIGHTS[0] <= weight <= WEIGHTS[1]:
            raise InvalidRequest(
                f"curriculum: the weight of {name[:80]!r} is {WEIGHTS[0]:g} to {WEIGHTS[1]:g}, not {weight}; leave a "
                "name out to open none of its tasks",
                param="curriculum",
            )


class SetControl(OwnerRequest, frozen=True, kw_only=True):
    """`control` for the policy that the trainer owns."""

    control: RolloutControl


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus(PolicyState):
    """A policy with its counts, as in `PolicyStats`.

    `engine` is the name of its engine or pool. `control` is what a trainer has set for the rollouts to come, and
    `control_run` its run (None: the admin plane). `relayed`: the dialects whose calls go to a vendor under the user's
    own key; empty where rolltap's keys are taken. `context`: the context length in tokens, 0 if unknown.
    `weights`: how the weights that the engines have differ from the policy's; empty if they do not. While it is set,
    calls are refused.
    """

    policy: str
    engine: str
    trainable: bool
    relayed: Sequence[str]
    context: int = 0
    weights: str = ""
    groups: Mapping[str, int]
    rollouts: Mapping[str, int]
    outstanding: int
    room: int | None
    zero_variance: int
    staleness: Mapping[int, int]
    abandoned: int
    control: RolloutControl
    control_run: str | None = None
    untrained: int = 0
    unanswered: int = 0


@dataclass(frozen=True, slots=True)
class PolicyList:
    """The served policies."""

    policies: Sequence[PolicyStatus]
