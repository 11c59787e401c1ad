"""GSPO: Zheng et al. 2025, "Group Sequence Policy Optimization".

GRPO's advantage, with one ratio a rollout (eq. 7) and its gradient through each token (eq. 13):

    s = exp(mean over trained tokens of log pi - log pi_old)        rho_t = sg(s) pi_t / sg(pi_t)

The mean is over rollouts; the clip is the paper's 3e-4 and 4e-4. The rollout is the sequence, all its rows together.
"""

from __future__ import annotations

from rolltap.trainer_client.recipe import Recipe


class GSPO(Recipe):
    settings = {"loss": {"normalise": "rollout", "ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}}
