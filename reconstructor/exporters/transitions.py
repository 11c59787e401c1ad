"""Step transitions with returns, for offline RL: one row per trained call.

An episode is one agent's trained calls of a session, in call order. A step's `reward` is the sum of the rewards of its
own call (scopes `call:<id>` and `span:<id>:<start>:<end>`); the main agent's last step also has the rollout's reward.
`return_to_go` is G_t = r_t + gamma * G_{t+1}. `prompt_ids` is the state that the engine saw, `output_ids` the action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rolltap.errors import DatasetError
from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, SkippedItem, texts_behind, trained_spans
from rolltap.types import NO_VERSION, Call, CallSpan, Int32, Segment, call_order


@dataclass(frozen=True, slots=True)
class Transitions:
    """`gamma` is the discount per step."""

    gamma: float = 1.0

    name: ClassVar[str] = "transitions"
    containers: ClassVar[tuple[Container, ...]] = ("parquet", "jsonl")
    faithful: ClassVar[bool] = True
    for_training: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise DatasetError(f"--option gamma: expected a number from 0 to 1, not {self.gamma}")

    def schema(self) -> Mapping[str, str]:
        return {
            "session_id": "string",
            "rollout_id": "string",
            "group_id": "string",
            "task_id": "string",
            "step": "int32",
            "turn_index": "int32",
            "call_id": "string",
            "agent": "string",
            "prompt_ids": "list<int32>",
            "output_ids": "list<int32>",
            "logprobs": "list<float32>",
            "versions": "list<int32>",
            "reward": "float64",
            "return_to_go": "float64",
            "done": "bool",
        }

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | SkippedItem]:
        for item in group:
            steps = [(turn, segment) for segment in item.rows for turn in trained_spans(segment)]
            if not steps:
                yield SkippedItem("no tokens that may be trained")
            order = {call_id: place for place, call_id in enumerate(call_order(item.trajectory))}
            steps.sort(key=lambda step: order[step[0].call_id])
            for agent in dict.fromkeys(turn.agent for turn, _ in steps):
                yield from self._episode(item, [step for step in steps if step[0].agent == agent])

    def _episode(self, item: ExportItem, steps: Sequence[tuple[CallSpan, Segment]]) -> Iterable[Row]:
        """The steps of one agent."""
        rewards = step_rewards(item, [turn for turn, _ in steps])
        returns = returns_to_go(rewards, self.gamma)
        for step, (turn, segment) in enumerate(steps):
            call = item.calls[turn.call_id]
            values = {
                **item.labels(),
                "step": step,
                "turn_index": turn.index,
                "call_id": turn.call_id,
                "agent": turn.agent,
                "prompt_ids": call.prompt_ids,
                "output_ids": call.output_ids,
                "logprobs": call.logprobs,
                "versions": versions_of(call),
                "reward": rewards[step],
                "return_to_go": returns[step],
                "done": step == len(steps) - 1,
            }
            behind = [each.call_id for each in segment.turns if each.end <= turn.end]
            yield Row(values, texts=texts_behind(item, behind))


def step_rewards(item: ExportItem, turns: Sequence[CallSpan]) -> list[float]:
    """The reward of each step of one agent's episode. The rollout's reward is added to the main agent's last step."""
    by_call: defaultdict[str, float] = defaultdict(float)
    for reward in item.rewards:
        scope, _, rest = reward.scope.partition(":")
        if scope in ("call", "span"):
            by_call[rest.partition(":")[0]] += reward.value
    rewards = [by_call[turn.call_id] for turn in turns]
    if not turns[-1].agent or all(segment.agent for segment in item.rows):
        rewards[-1] += item.reward or 0.0
    return rewards


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_t = r_t + gamma * G_{t+1}."""
    returns = [0.0] * len(rewards)
    later = 0.0
    for step in range(len(rewards) - 1, -1, -1):
        later = rewards[step] + gamma * later
        returns[step] = later
    return returns


def versions_of(call: Call) -> Int32:
    """The weight version of each sampled token, [T]."""
    versions = np.full(len(call.output_ids), NO_VERSION, np.int32)
    for span in call.versions:
        versions[span.start : span.end] = span.version
    return versions
