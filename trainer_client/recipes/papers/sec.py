"""SEC: Chen et al. 2025, "Self-Evolving Curriculum for LLM Reasoning" (arXiv 2505.14970).

    Q(c) <- rate r(c) + (1 - rate) Q(c), from 0        r(c) = mean |A| of the step's rollouts of category c
    weight of c = exp(Q(c) / spread)                   with GRPO's advantage A

A category is a task's tag: one of `tags`, or any if `tags` is empty. The weights are the curriculum of the tasks that
are opened next. Categories without a value yet, and tasks of none, have Q = 0; so have, where there are more categories
than a curriculum may name, those whose values are nearest to 0. The defaults of `rate` and `spread` are ours. Groups of
equal rewards must be trained, too (no `drop_zero_variance`): a category that is solved would else keep its value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rolltap.contract.control import MOST_NAMES, OTHERS, WEIGHTS, RolloutControl, is_task_name
from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import normalise


@dataclass
class SEC(Recipe):
    tags: tuple[str, ...] = ()
    rate: float = 0.5
    spread: float = 0.5
    values: dict[str, float] = field(default_factory=dict, init=False)

    def credit(self, step: Step) -> Credit:
        advantages = normalise(step.rewards, step.groups)
        gains: dict[str, list[float]] = {}
        for rollout, advantage in zip(step.rollouts, advantages, strict=True):
            for tag in rollout.tags:
                if not self.tags or tag in self.tags:
                    gains.setdefault(tag, []).append(abs(float(advantage)))
        for tag, gain in gains.items():
            self.values[tag] = self.rate * float(np.mean(gain)) + (1 - self.rate) * self.values.get(tag, 0.0)
        return step.broadcast(advantages)

    def after(self, step: int) -> RolloutControl:
        """Values .5 and 0 at spread .5 → weights e : 1; before the first step all tasks alike."""
        categories = {**dict.fromkeys(self.tags, 0.0), **self.values}
        named = sorted(filter(is_task_name, categories), key=lambda tag: categories[tag], reverse=True)[
            : MOST_NAMES - 1
        ]
        values = {OTHERS: 0.0, **{tag: categories[tag] for tag in named}}
        highest = max(values.values())
        weights = {tag: float(np.exp((value - highest) / self.spread)) for tag, value in values.items()}
        return RolloutControl(curriculum={tag: max(weight, WEIGHTS[0]) for tag, weight in weights.items()})
