"""Chain-of-Agents: Li et al. 2025, "Chain-of-Agents: End-to-End Agent Foundation Models via Multi-Agent Distillation".

Settings of `dapo`; the method's first half is data:

1. Runs of a multi-agent system are distilled into one conversation of all roles. An `sft` export has a row for each
   role; joining them, with the role's tag before each reply, is left to a script of yours.
2. DAPO on the model that came of it (recipe `dapo`), with the outcome as its reward: role tags are the model's own
   words then, so all of a rollout is one agent. The length penalty is off.
"""

from __future__ import annotations

from rolltap.trainer_client.recipes.dapo import DAPO


class ChainOfAgents(DAPO):
    settings = {"loss": {**DAPO.settings["loss"], "overlong_limit": 0}}
