"""Step transitions with returns, for offline RL: one row a trained call.

An episode is a session's trained calls in the order in which they were made. A step's `reward` is the sum of the
rewards of its own call (scope `call:<id>`); the rollout's reward comes with the last step of the main agent, and
`return_to_go` is G_t = r_t + gamma * G_{t+1}. `prompt_ids` is the state that the engine saw, `output_ids` the action.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rolltap.reconstructor.exporters.base import Container, ExportItem, Row, Skipped, trained_spans
from rolltap.types import NO_VERSION, Call, CallSpan, Int32


@dataclass(frozen=True, slots=True)
class Transitions:
    """`gamma` discounts by step."""

    gamma: float = 1.0

    name: ClassVar[str] = "transitions"
    containers: ClassVar[tuple[Container, ...]] = ("parquet", "jsonl")
    faithful: ClassVar[bool] = True

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

    def rows(self, group: Sequence[ExportItem]) -> Iterable[Row | Skipped]:
        for item in group:
            turns = sorted((turn for segment in item.rows for turn in trained_spans(segment)), key=lambda t: t.call_id)
            if not turns:
                yield Skipped("no tokens that may be trained")
                continue
            rewards = step_rewards(item, turns)
            returns = returns_to_go(rewards, self.gamma)
            for step, turn in enumerate(turns):
                call = item.calls[turn.call_id]
                text = item.texts.get(turn.call_id)
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
                    "done": step == len(turns) - 1,
                }
                yield Row(values, texts=(text.conversation, text.tools) if text is not None else ())


def step_rewards(item: ExportItem, turns: Sequence[CallSpan]) -> list[float]:
    """Each step's reward; the rollout's own is added to the main agent's last step."""
    by_call: defaultdict[str, float] = defaultdict(float)
    for reward in item.rewards:
        scope, _, call_id = reward.scope.partition(":")
        if scope == "call":
            by_call[call_id] += reward.value
    rewards = [by_call[turn.call_id] for turn in turns]
    main = [step for step, turn in enumerate(turns) if not turn.agent]
    rewards[main[-1] if main else -1] += item.reward or 0.0
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
