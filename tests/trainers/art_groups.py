"""ART under the contract suite: its own assembly of rows and advantages; a stand-in backend makes the steps.

ART's backends need a GPU. What they begin with is `tokenize_trajectory_groups`, which is run here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art  # type: ignore[import-not-found]
import numpy as np
import torch
from art.preprocessing.tokenize import tokenize_trajectory_groups  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltap.trainer_client.adapters.art_groups import ArtSettings, ArtTrainer
from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import DyingSGD, Run, Seen, TrainedToken, tokens_of


@dataclass(frozen=True, slots=True)
class Trained:
    step: int
    checkpoint_path: str


class StandIn:
    """The model and its backend in one: `get_step` and `train`, on folders named like ART's checkpoints."""

    def __init__(self, run: Run) -> None:
        self.run, self.folder = run, run.out / "art"
        self.tokenizer = AutoTokenizer.from_pretrained(run.model)
        newest = max(self.folder.glob("[0-9]*"), default=run.model)
        self.step = int(newest.name) if newest != run.model else 0
        self.model = AutoModelForCausalLM.from_pretrained(newest, attn_implementation="eager")
        self.optimiser = DyingSGD(self.model, run.die_at, self.step)
        self.seen: list[list[TrainedToken]] = []

    async def get_step(self) -> int:
        return self.step

    async def train(self, model: Any, groups: list[art.TrajectoryGroup], *, scale_rewards: bool) -> Trained:
        self.seen.append([])
        rows = list(
            tokenize_trajectory_groups(
                self.tokenizer,
                groups,
                False,
                scale_rewards,
                shuffle_group_trajectories=False,
                drop_zero_advantage_trajectories=False,
            )
        )
        tokens = sum(sum(row.assistant_mask) for row in rows)
        for row in rows:
            ids, mask = np.array(row.token_ids), np.array(row.assistant_mask)
            old = np.nan_to_num(np.array(row.logprobs))
            self.seen[-1] += tokens_of(ids, mask, old)
            places = torch.from_numpy(np.flatnonzero(mask))
            logprobs = self.model(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
            new = logprobs[places - 1, torch.from_numpy(ids)[places]]
            ratio = (new - torch.from_numpy(old).float()[places]).exp()
            gain = torch.minimum(ratio * row.advantage, ratio.clamp(0.9, 1.15) * row.advantage)
            (-gain.sum() / tokens).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        folder = self.folder / f"{self.step:04d}"
        self.model.save_pretrained(folder)
        return Trained(self.step, str(folder))


class ArtGroups:
    spends_steps = False
    normalise, advantage = "token", "dr_grpo"

    def run(self, run: Run) -> Seen:
        settings = FeedSettings("policy", run.groups, Path(run.out / "weights"), wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        backend = StandIn(run)
        chosen = ArtSettings(VOCABULARY, run.steps, options={"scale_rewards": False})
        asyncio.run(ArtTrainer(backend, backend, feed, chosen, backend.tokenizer).train())
        return Seen(backend.seen, backend.optimiser.gradient, {})
