"""NeMo RL under the contract suite: its message logs, batches and loss, with its source; stand-ins without.

Its `Policy` needs Ray and GPUs: a transformers model stands for it, in passes of four rows.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY
from .driver import CLIP, DyingSGD, Run, Seen, TrainedToken, tokens_of
from .sources import FOLDER, Schema, module, provide, schema

ROWS = 4


def stand_in(of: Schema) -> None:
    def flat(logs: list[Any], pad_value_dict: dict[str, int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        names = [name for name, value in logs[0][0].items() if isinstance(value, torch.Tensor)]
        rows = {name: [torch.cat([message[name] for message in log]) for log in logs] for name in names}
        padded = {name: pad_sequence(of, True, pad_value_dict.get(name, 0)) for name, of in rows.items()}
        return padded, torch.tensor([len(row) for row in rows["token_ids"]])

    module("nemo_rl.distributed.batched_data_dict", BatchedDataDict=type("BatchedDataDict", (dict,), {}))
    module("nemo_rl.data.llm_message_utils", batched_message_log_to_flat_message=flat)


provide("nemo-rl", "", stand_in=stand_in)
if FOLDER:
    from . import nemo_rl_source  # its imports come before the adapter's
from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed  # noqa: E402
from rolltap.trainer_client.adapters.nemo_rl_policy import NemoSettings, NemoTrainer  # noqa: E402


class Policy:
    """Stands for NeMo RL's, on one worker."""

    def __init__(self, run: Run, checkpoint: Path | None, optimisers: list[DyingSGD]) -> None:
        folder = run.model if checkpoint is None else checkpoint / "weights"
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        done = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
        self.optimiser = DyingSGD(self.model, run.die_at, done)
        self.seen: list[list[TrainedToken]] = []
        optimisers.append(self.optimiser)

    def prepare_for_training(self) -> None:
        self.seen.append([])

    def train(self, batch: Any, loss: Any, gbs: int) -> dict[str, torch.Tensor]:
        known = {name for name, *_ in schema("nemo-rl").fields("ClippedPGLossDataDict")} | {"input_lengths"}
        assert set(batch) <= known
        assert gbs == len(batch["input_ids"])
        sequences = batch["sample_mask"].sum()
        tokens = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].sum()
        values = []
        for start in range(0, gbs, ROWS):
            part = type(batch)({name: value[start : start + ROWS] for name, value in batch.items()})
            ids, lengths = part["input_ids"], part["input_lengths"]
            attention = torch.arange(ids.shape[1])[None] < lengths[:, None]
            logits = self.model(ids, attention_mask=attention.long()).logits
            values.append(loss.value(logits, part, sequences, tokens))
            values[-1].backward()
            for row in range(len(ids)):
                length = int(lengths[row])
                mask, old = part["token_mask"][row, :length] > 0, part["generation_logprobs"][row, :length]
                if part["sample_mask"][row]:
                    self.seen[-1] += tokens_of(ids[row, :length].numpy(), mask.numpy(), old.numpy())
        self.optimiser.step()
        self.optimiser.zero_grad()
        return {"loss": torch.stack(values).detach().sum()[None], "grad_norm": torch.tensor(0.0)}

    def save_checkpoint(self, weights: str, optimizer: str) -> None:
        self.model.save_pretrained(weights)

    def finalize_async_save(self) -> None:
        return None


class SchemaLoss(SimpleNamespace):
    """The clipped loss of a batch with the schema's fields."""

    def value(self, logits: torch.Tensor, part: Any, sequences: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        new = logits[:, :-1].log_softmax(-1).gather(-1, part["input_ids"][:, 1:, None])[..., 0]
        ratio, advantages = (new - part["prev_logprobs"][:, 1:]).exp(), part["advantages"][:, 1:]
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantages)
        return -(gain * part["token_mask"][:, 1:] * part["sample_mask"][:, None]).sum() / tokens


class NemoRl:
    spends_steps = False
    advantage = "dr_grpo"

    def __init__(self, *, by_sequence: bool = False) -> None:
        self.normalise = "rollout" if by_sequence else "token"

    def run(self, run: Run) -> Seen:
        feed = open_feed(
            run.url,
            KEY,
            FeedSettings("policy", run.groups, run.out / "weights", wait=0.2),
            trainer="theirs",
            out=run.out,
        )
        tokenizer = AutoTokenizer.from_pretrained(run.model)
        settings = NemoSettings(run.steps, VOCABULARY, 100, tokenizer, multiple=ROWS, recipe=self.advantage)
        policies: list[Policy] = []
        optimisers: list[DyingSGD] = []
        logged: dict[str, list[float]] = {"staleness": []}

        def make_policy(checkpoint: Path | None) -> Policy:
            policies.append(Policy(run, checkpoint, optimisers))
            return policies[-1]

        def log(metrics: dict[str, float], step: int, prefix: str) -> None:
            logged["staleness"].append(metrics["rolltap_staleness_max"])

        trainer = NemoTrainer(
            feed,
            settings,
            make_policy,
            self._loss(),
            lambda checkpoint: run.model if checkpoint is None else checkpoint / "weights",
            log,
        )
        trainer.train()
        return Seen(policies[0].seen, policies[0].optimiser.gradient, logged)

    def _loss(self) -> Any:
        if FOLDER:
            return nemo_rl_source.Loss(by_sequence=self.normalise == "rollout", clip=CLIP)  # pyright: ignore[reportPossiblyUnboundVariable]
        return SchemaLoss(loss_type=SimpleNamespace(name="TOKEN_LEVEL"), reference_policy_kl_penalty=0.0)
