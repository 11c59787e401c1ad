"""Papers whose method is a set of settings of GRPO, DAPO or PPO: the docstring of each class has the paper."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.papers.ppo import PPO


class DAPO(Recipe):
    """DAPO: Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale".

    GRPO's advantage with four changes, all of them settings: a wider upper clip (eq. 8: 0.2 and 0.28), groups whose
    rewards are all equal replaced (dynamic sampling, eq. 11), the mean over all tokens (eq. 12), and a soft length
    penalty (eq. 13)

        0 up to limit - buffer        (limit - buffer - length) / buffer up to limit        -1 beyond

    The paper's limit is 20,480 tokens; set `loss.overlong_limit` to the rollouts' own. No KL.
    """

    settings = {
        "loss": {
            "normalise": "token",
            "clip_high": 0.28,
            "drop_zero_variance": True,
            "overlong_limit": 20_480,
            "overlong_buffer": 4096,
        }
    }


class ChainOfAgents(DAPO):
    """Chain-of-Agents: Li et al. 2025, "Chain-of-Agents: End-to-End Agent Foundation Models via Multi-Agent
    Distillation".

    Settings of `dapo`; the method's first half is data:

    1. Runs of a multi-agent system are distilled into one conversation of all roles. An `sft` export has a row for each
       role; joining them, with the role's tag before each reply, is left to a script of yours.
    2. DAPO on the model that came of it (recipe `dapo`), with the outcome as its reward: role tags are the model's own
       words then, so all of a rollout is one agent. The length penalty is off.
    """

    settings = {"loss": {**DAPO.settings["loss"], "overlong_limit": 0}}


class GRPOTCR(Recipe):
    """GRPO-TCR: Yu et al. 2025, "Demystifying Reinforcement Learning in Agentic Reasoning".

    GRPO with the token mean (T), the higher upper clip (C, 0.28) and a penalty on overlong rollouts (R, buffer 4,096),
    and groups of equal rewards replaced. Set `loss.overlong_limit` to the token limit of a rollout.
    """

    settings = {"loss": {"normalise": "token", "clip_high": 0.28, "drop_zero_variance": True, "overlong_buffer": 4096}}


class GSPO(Recipe):
    """GSPO: Zheng et al. 2025, "Group Sequence Policy Optimization".

    GRPO's advantage, with one ratio a rollout (eq. 7) and its gradient through each token (eq. 13):

        s = exp(mean over trained tokens of log pi - log pi_old)        rho_t = sg(s) pi_t / sg(pi_t)

    The mean is over rollouts; the clip is the paper's 3e-4 and 4e-4. The rollout is the sequence, with all its rows.
    """

    settings = {"loss": {"normalise": "rollout", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}}


class ARTIST(Recipe):
    """ARTIST: Singh et al. 2025, "Agentic Reasoning and Tool Integration for LLMs via Reinforcement Learning".

    GRPO on rewards of outcome, format and tool use that the evaluator adds up; the loss is the mean of the rollouts'
    means. What tools answer is masked in the paper: in a record it never carries loss, since nobody sampled it.
    """

    settings = {"loss": {"normalise": "rollout"}}


class MUARL(Recipe):
    """MUA-RL: Zhao et al. 2025, "MUA-RL: Multi-turn User-interacting Agent Reinforcement Learning for Agentic Tool
    Use".

    GRPO with a simulated user in the rollout: a role with a frozen policy, whose calls are context and carry no loss,
    as little as tools' answers do. Groups of 8 at temperature 1, 32 a step; the reward is the task's, at the end.
    """

    settings = {"groups": 32}


@dataclass
class AISearchPlanner(PPO):
    """AI-SearchPlanner: Mei et al. 2025, "AI-SearchPlanner: Modular Agentic Search via Pareto-Optimal Multi-Objective
    Reinforcement Learning".

    Settings: PPO with GAE, as in recipe `ppo`, on a small planner that searches and leaves the answer to a frozen
    generator: two roles of a rollout, of which the generator's calls are context. Its dual reward (answer and plan)
    less the weighed cost of planning is the evaluator's; the record has the turns and tokens that the cost is made of.
    """
