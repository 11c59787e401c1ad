"""prime-rl under the contract suite: what reads the step files is its own receiver, tensors and loss, with its source.

Without, a stand-in reads them by the schema's fields. Its trainer needs GPUs: a transformers model stands for it, and
trains whenever its weights are waited for. prime-rl's loss masks tokens instead of clipping; its masks are off here.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import DyingSGD, Run, Seen, TrainedToken, tokens_of
from .sources import FOLDER, Schema, module, provide

STRUCTS: dict[str, Any] = {}


def stand_in(of: Schema) -> None:
    """Structs with the schema's fields in their order, and a packer that packs nothing: a sample a micro batch."""
    known = {"EncodedTensor": Any, "RoutedExperts": Any, "Any": Any}
    for name in ("TrainingSample", "MicroBatch"):
        fields = [
            (field, eval(kind, known)) if default is None else (field, eval(kind, known), eval(default))
            for field, kind, default in of.fields(name)
        ]
        STRUCTS[name] = msgspec.defstruct(name, fields, array_like=True, omit_defaults=True)
    module("prime_rl.transports.rollouts.types", **STRUCTS)

    def prepare_batch(samples: list[Any], seq_len: int, ranks: int, bin_cost: Any) -> list[list[Any]]:
        grid: list[list[Any]] = [[] for _ in range(ranks)]
        for number, one in enumerate(samples):
            length = len(one.token_ids)
            places, whole = list(range(length)), [length]
            grid[number % ranks].append(
                STRUCTS["MicroBatch"](
                    one.token_ids, one.mask, one.advantages, one.logprobs, places, whole, one.temperatures,
                    [one.env_name] * length, whole,
                )
            )  # fmt: skip
        return grid

    module("prime_rl.trainer.batch", prepare_batch=prepare_batch, build_bin_cost=lambda config: None)


provide("prime-rl", "src", "packages/prime-rl-configs/src", stand_in=stand_in)
from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed  # noqa: E402
from rolltap.trainer_client.adapters.prime_rl_files import LeasedOrchestrator, PrimeSettings  # noqa: E402


class Trainer:
    """Stands for prime-rl's: trains step files, broadcasts weights, and makes a checkpoint of each step."""

    def __init__(self, run: Run, out: Path) -> None:
        done = [int(path.name[5:]) for path in (out / "checkpoints").glob("step_*")]
        self.out, self.step = out, max(done, default=0)
        folder = out / "broadcasts" / f"step_{self.step}" if self.step else run.model
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.optimiser = DyingSGD(self.model, run.die_at, self.step)
        self.seen: list[list[TrainedToken]] = []

    def train_to(self, step: int) -> None:
        while self.step < step:
            self._train(self.step + 1)
            self.step += 1
            folder = self.out / "broadcasts" / f"step_{self.step}"
            self.model.save_pretrained(folder)
            (folder / "STABLE").touch()
            (self.out / "checkpoints" / f"step_{self.step}").mkdir(parents=True)

    def _train(self, step: int) -> None:
        self.seen.append([])
        micro_batches = self._received(step)
        trained = sum(int(one["loss_mask"].sum()) for one in micro_batches)
        for one in micro_batches:
            lengths = one["sequence_lengths"]
            logits = torch.cat([self.model(ids).logits for ids in one["input_ids"].split(lengths, 1)], 1)
            self._loss(one, logits / one["temperatures"][..., None], trained).backward()
            for ids, mask, old in zip(
                *(one[name][0].split(lengths) for name in ("input_ids", "loss_mask", "inference_logprobs")), strict=True
            ):
                self.seen[-1] += tokens_of(ids.numpy(), mask.numpy(), old.numpy())
        self.optimiser.step()
        self.optimiser.zero_grad()

    def _received(self, step: int) -> list[Any]:
        if FOLDER:
            from .prime_rl_source import received

            return received(self.out, step)
        written = (self.out / "rollouts" / f"step_{step}" / "rank_0.bin").read_bytes()
        micro_batches = msgspec.msgpack.decode(written, type=list[STRUCTS["MicroBatch"]])  # noqa: F821
        arrays = ("input_ids", "loss_mask", "advantages", "inference_logprobs", "temperatures")
        return [
            {name: torch.tensor(getattr(one, name))[None] for name in arrays}
            | {"sequence_lengths": one.sequence_lengths}
            for one in micro_batches
        ]

    def _loss(self, one: Any, logits: torch.Tensor, trained: int) -> torch.Tensor:
        if FOLDER:
            from .prime_rl_source import loss

            return loss(one, logits, trained)
        new = logits.log_softmax(-1)[0, :-1].gather(1, one["input_ids"][0, 1:, None])[:, 0]
        ratio = (new - one["inference_logprobs"][0, 1:]).exp()
        return -(ratio * one["advantages"][0, 1:])[one["loss_mask"][0, 1:]].sum() / trained


class Watched(LeasedOrchestrator):
    """Lets the trainer work when its weights are waited for."""

    trainer: Trainer

    def _weights(self, step: int) -> Path:
        self.trainer.train_to(step)
        return super()._weights(step)


class PrimeRl:
    spends_steps = False
    normalise, advantage = "token", "dr_grpo"
    clip = (1e9, 1e9)

    def run(self, run: Run) -> Seen:
        feed = open_feed(
            run.url,
            KEY,
            FeedSettings("policy", run.groups, run.out / "weights", wait=0.2),
            trainer="theirs",
            out=run.out,
        )
        settings = PrimeSettings(
            run.out / "run", 100, run.steps, run.model, VOCABULARY, recipe=self.advantage, weights_timeout=1.0
        )
        orchestrator = Watched(feed, settings, AutoTokenizer.from_pretrained(run.model))
        orchestrator.trainer = trainer = Trainer(run, run.out / "run")
        orchestrator.run()
        lines = [json.loads(line) for line in (run.out / "run" / "metrics.jsonl").read_text().splitlines()]
        staleness = [line["rolltap/staleness_max"] for line in lines]
        return Seen(trainer.seen, trainer.optimiser.gradient, {"staleness": staleness})
