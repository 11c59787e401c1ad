"""ART under the contract suite: its own rows, advantages, packing, loss and log; a stand-in backend makes the steps.

ART's backends need a GPU. What they begin with is run here, and a transformers model stands for the rest.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import art  # type: ignore[import-not-found]
import torch
from art.loss import LossInputs, loss_fn  # type: ignore[import-not-found]
from art.preprocessing.pack import packed_tensors_from_tokenized_results  # type: ignore[import-not-found]
from art.preprocessing.tokenize import tokenize_trajectory_groups  # type: ignore[import-not-found]
from art.types import LocalTrainResult  # type: ignore[import-not-found]
from art.utils.output_dirs import get_model_dir, get_step_checkpoint_dir  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltap.trainer_client.adapters.art_groups import ArtSettings, ArtTrainer
from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import CLIP, DyingSGD, Run, Seen, TrainedToken, tokens_of

LENGTH = 1024
"""Of a packed row: a step fits in one, since ART takes the mean of each row by itself."""


class StandIn:
    """A backend with its checkpoints where ART's have them."""

    def __init__(self, run: Run, model: art.TrainableModel) -> None:
        self.model_folder = get_model_dir(model, model.base_path)
        self.folder = Path(get_step_checkpoint_dir(self.model_folder, 0)).parent
        self.tokenizer = AutoTokenizer.from_pretrained(run.model)
        newest = max(self.folder.glob("[0-9]*"), default=run.model)
        self.step = int(newest.name) if newest != run.model else 0
        self.model = AutoModelForCausalLM.from_pretrained(newest, attn_implementation="eager")
        self.optimiser = DyingSGD(self.model, run.die_at, self.step)
        self.seen: list[list[TrainedToken]] = []
        self.scales: list[float] = []

    async def register(self, model: Any) -> None:
        return None

    async def _prepare_backend_for_training(self, model: Any, config: Any) -> tuple[str, str]:
        return "", ""

    async def _get_step(self, model: Any) -> int:
        return self.step

    async def train(self, model: Any, groups: list[art.TrajectoryGroup], *, scale_rewards: bool) -> Any:
        packed = self.packed(groups, scale_rewards)
        assert len(packed["tokens"]) == 1
        self.seen.append(tokens_in(packed))
        loss = loss_fn(
            LossInputs(inputs=packed),
            self.logprobs(packed),
            None,
            None,
            {"ppo": True, "epsilon": CLIP[0], "epsilon_high": CLIP[1]},
        )
        loss.policy_loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.step += 1
        folder = get_step_checkpoint_dir(self.model_folder, self.step)
        self.model.save_pretrained(folder)
        return LocalTrainResult(step=self.step, metrics={"loss/train": loss.policy_loss.item()}, checkpoint_path=folder)

    def packed(self, groups: list[art.TrajectoryGroup], scale_rewards: bool) -> Any:
        """ART's tensors of a step. It scales a step's advantages to a mean of 1; `scales` has by what."""
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
        packed = packed_tensors_from_tokenized_results(rows, LENGTH, pad_token_id=self.tokenizer.eos_token_id)
        self.scales.append(float(packed["advantages"].abs().max()) / max(abs(row.advantage) for row in rows))
        return packed

    def logprobs(self, packed: Any) -> torch.Tensor:
        """Of each token's successor. A token sees its own segment and the one that it continues, as ART masks them."""
        tokens, groups, parents = (packed[name] for name in ("tokens", "group_ids", "parent_ids"))
        same = (groups[:, :, None] == groups[:, None]) | (parents[:, :, None] == groups[:, None])
        visible = same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        hidden = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[:, None]
        logits = self.model(tokens, attention_mask=hidden, position_ids=packed["input_pos"]).logits
        return logits.log_softmax(-1).gather(-1, tokens.roll(-1, 1)[..., None])[..., 0]


def tokens_in(packed: Any) -> list[TrainedToken]:
    """The trained tokens of each segment of a packed row, after the segment that it continues."""
    ids, groups, parents, mask, logprobs = (
        packed[name][0] for name in ("tokens", "group_ids", "parent_ids", "assistant_mask", "logprobs")
    )
    found = []
    for own in groups[groups >= 0].unique():
        at = (groups == own) | (groups == parents[groups == own][0])
        trained = mask[at] & (groups[at] == own)
        found += tokens_of(ids[at].numpy(), trained.numpy(), logprobs[at].numpy())
    return found


class ArtGroups:
    spends_steps = False
    normalise, advantage = "rollout", "dr_grpo"

    def run(self, run: Run) -> Seen:
        return asyncio.run(self._run(run))

    async def _run(self, run: Run) -> Seen:
        settings = FeedSettings("policy", run.groups, Path(run.out / "weights"), wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        model = art.TrainableModel(
            name="policy",
            run_name="run",
            project="ours",
            base_model=str(run.model),
            base_path=str(run.out / "art"),
            report_metrics=[],
        )
        backend = StandIn(run, model)
        await model.register(backend)
        chosen = ArtSettings(VOCABULARY, run.steps, options={"scale_rewards": False})
        await ArtTrainer(model, backend, feed, chosen, backend.tokenizer).train()
        lines = [json.loads(line) for file in run.out.rglob("history.jsonl") for line in file.read_text().splitlines()]
        logged = {"staleness": [line["train/rolltap/staleness_max"] for line in lines]}
        gradient = {name: one / backend.scales[0] for name, one in backend.optimiser.gradient.items()}
        return Seen(backend.seen, gradient, logged)
