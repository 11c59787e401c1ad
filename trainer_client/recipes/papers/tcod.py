"""TCOD (forward): "TCOD: Exploring Temporal Curriculum in On-Policy Distillation for Multi-turn Autonomous Agents".

    A_k = strength (log pi_teacher(token) - log pi(token))        on the tokens that the student sampled
    at most min(1 + floor(step / every), most) turns a rollout

Clipped as in PPO, mean over rollouts of their means; the released code's are means over turns. The teacher is the
folder of option `teacher`, of the student's vocabulary. The cap is set on the policy: attempts that begin after a step
have it. The backward variant, in which the student goes on from an expert's turns, is examples/systems/tcod.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rolltap.contract.control import RolloutControl
from rolltap.errors import ConfigError
from rolltap.trainer_client.data.step import POLICY, Credit, Pass, ReadNetwork, Step
from rolltap.trainer_client.recipes.base import Recipe


@dataclass
class TCOD(Recipe):
    settings = {"loss": {"normalise": "rollout"}, "optimiser": {"lr": 1e-6}, "max_staleness": 2}
    teacher: str = ""
    strength: float = 1.0
    every: int = 6
    most: int = 30

    def networks(self) -> Mapping[str, ReadNetwork]:
        if not self.teacher:
            raise ConfigError("trainer.options.teacher: name the folder of the teacher's model")
        return {"teacher": ReadNetwork(self.teacher)}

    def passes(self, step: Step) -> Mapping[str, Pass]:
        return {POLICY: Pass(), "teacher": Pass("teacher")}

    def credit(self, step: Step) -> Credit:
        teacher, own = step.readings["teacher"].logprobs, step.readings[POLICY].logprobs
        return Credit(tuple(self.strength * (one - other) for one, other in zip(teacher, own, strict=True)))

    def after(self, step: int) -> RolloutControl:
        """After 0, 6, 60, 249 steps → 1, 2, 11, 30 turns."""
        return RolloutControl(max_turns=min(1 + step // self.every, self.most))
