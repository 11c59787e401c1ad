"""AI-SearchPlanner: Mei et al. 2025, "AI-SearchPlanner: Modular Agentic Search via Pareto-Optimal Multi-Objective
Reinforcement Learning".

Settings: PPO with GAE, as in recipe `ppo`, on a small planner that searches and leaves the answer to a frozen
generator: two roles of a rollout, of which the generator's calls are context. Its dual reward (answer and plan) less
the weighed cost of planning is the evaluator's; the record has the turns and tokens that the cost is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.trainer_client.recipes.ppo import PPO


@dataclass
class AISearchPlanner(PPO):
    """PPO on the planner's calls."""
