"""Tinker under the contract suite. The service is remote: a stand-in takes the SDK's own types and makes real steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.tinker_service import TinkerSettings, TinkerTrainer

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import DyingSGD, Run, Seen, TrainedToken, tokens_of


@dataclass(frozen=True, slots=True)
class Done:
    """A finished future of the SDK's."""

    path: str = ""

    def result(self) -> Done:
        return self


class StandIn:
    """What the adapter asks of a `tinker.TrainingClient`, on a model in this process: `ppo` summed over tokens."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = AutoModelForCausalLM.from_pretrained(run.model, attn_implementation="eager")
        self.optimiser = DyingSGD(self.model, run.die_at)
        self.seen: list[list[TrainedToken]] = []

    def get_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.run.model)

    def forward_backward(self, data: list[tinker.Datum], loss: str, config: dict[str, float]) -> Done:
        assert loss == "ppo"
        self.seen.append([])
        for datum in data:
            ids = np.array(datum.model_input.to_ints())
            target, logprobs, advantages = (
                datum.loss_fn_inputs[name].to_torch() for name in ("target_tokens", "logprobs", "advantages")
            )
            whole = np.append(ids, target[-1].item())
            mask = np.append(False, logprobs.numpy() != 0)
            self.seen[-1] += tokens_of(whole, mask, np.append(0.0, logprobs.numpy()))
            logits = self.model(torch.from_numpy(ids)[None]).logits[0]
            ratio = (logits.log_softmax(-1).gather(-1, target[:, None])[:, 0] - logprobs).exp()
            clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
            (-torch.minimum(ratio * advantages, clipped * advantages).sum()).backward()
        return Done()

    def optim_step(self, _: tinker.AdamParams) -> Done:
        self.optimiser.step()
        self.optimiser.zero_grad()
        return Done()

    def save_state(self, name: str) -> Done:
        return self._saved(f"state-{name}")

    def save_weights_for_sampler(self, name: str) -> Done:
        return self._saved(f"sampler-{name}")

    def load_state_with_optimizer(self, path: str) -> Done:
        saved = AutoModelForCausalLM.from_pretrained(path.removeprefix("tinker://"))
        self.model.load_state_dict(saved.state_dict())
        return Done()

    def _saved(self, name: str) -> Done:
        folder = self.run.out / "service" / name
        self.model.save_pretrained(folder)
        return Done(f"tinker://{folder}")


class TinkerService:
    spends_steps = False
    normalise, advantage = "token", "dr_grpo"

    def run(self, run: Run) -> Seen:
        settings = FeedSettings("policy", run.groups, run.out / "weights", wait=0.2)
        feed = open_feed(run.url, KEY, settings, trainer="theirs", out=run.out)
        client = StandIn(run)
        config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.15}
        chosen = TinkerSettings(VOCABULARY, run.steps, self.advantage, loss_config=config)
        TinkerTrainer(client, feed, chosen, lambda path: Path(path.removeprefix("tinker://"))).train()
        return Seen(client.seen, client.optimiser.gradient, {})
