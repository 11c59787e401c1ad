"""MARS: Yuan et al. 2025, "MARS: Reinforcing Multi-Agent Reasoning of LLMs through Self-Play in Strategic Games".

    r'_t = r_t - mean of the player's rewards        G_t = sum over k >= t of r'_k, along the player's own turns
    A_t = G_t - mean of the distinct values of the player's G        then whitened over the step (`whitened`)

A player is an agent (a seat) of the harness; means are over the step. Turns take their own rewards, the last turn of a
player its `role:<player>` reward too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rolltap.trainer_client.data.step import Credit, Step
from rolltap.trainer_client.recipes.base import Recipe
from rolltap.trainer_client.recipes.estimators import centre, keyed, returns, whiten


@dataclass
class MARS(Recipe):
    settings = {"loss": {"kl": 0.2, "clip_high": 0.2}}
    needs = ("roles",)
    whitened: bool = True

    def credit(self, step: Step) -> Credit:
        players = keyed(turn.agent for turn in step.turns)
        to_go = returns(centre(step.with_roles(), players), step.sequences(by_agent=True))
        for player in np.unique(players):
            own = players == player
            to_go[own] -= np.unique(np.round(to_go[own], 9)).mean()
        return step.broadcast_turns(whiten(to_go) if self.whitened else to_go)
