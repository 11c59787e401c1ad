"""prime-rl's trainer on leased groups: replaces its orchestrator, on the filesystem transport.

A step is `rollouts/step_N/rank_R.bin`, which prime-rl's own packer fills with segments. Before groups are leased, the
weights of the previous step are awaited in `broadcasts/step_N` and pushed to the engines. Groups are acknowledged
before the step's files appear. prime-rl's mean is over all trained tokens, so a rollout's weight is its token count.

A restart resumes from the trainer's newest checkpoint and removes the files of later steps: start it before the
trainer.
"""

# pyright: reportMissingImports=false
# prime-rl is on no package index; the tests run it from its source.

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import TrainerError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed, write_version
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.trainer_client.recipes import make_recipe

ADAPTERS["prime-rl"].check_installed()
from prime_rl.trainer.batch import build_bin_cost, prepare_batch  # noqa: E402
from prime_rl.transports.rollouts.types import TrainingSample  # noqa: E402


@dataclass(frozen=True, slots=True)
class PrimeSettings:
    """The trainer's own settings: `output_dir`, `model.seq_len`, `max_steps`, and its number of data-parallel `ranks`.
    `model` is the folder of the initial model, with `vocabulary` tokens in its config."""

    output_dir: Path
    seq_len: int
    steps: int
    model: Path
    vocabulary: int
    ranks: int = 1
    recipe: str = "grpo"
    temperature: float = 1.0
    weights_timeout: float = 3600.0


class LeasedOrchestrator:
    """Sends `settings.steps` steps from `feed` to a trainer. `tokenizer` is the model's."""

    def __init__(self, feed: Feed, settings: PrimeSettings, tokenizer: Any) -> None:
        self.feed, self.settings, self._tokenizer = feed, settings, tokenizer
        self._recipe = make_recipe(settings.recipe, {})
        self.step = max(_steps(settings.output_dir / "checkpoints"), default=0)

    def run(self) -> None:
        """Runs to the last step. Returns when its weights are served."""
        settings = self.settings
        for folder in ("rollouts", "broadcasts"):
            for step in _steps(settings.output_dir / folder):
                if step > self.step:
                    shutil.rmtree(settings.output_dir / folder / f"step_{step}")
        with self.feed.leasing(settings.vocabulary, longest=settings.seq_len):
            self.feed.connect(
                self.feed.version_folder(self.step, "rolltap") if self.step else None, self.step, self._tokenizer
            )
            self.feed.serve(self._weights(self.step) if self.step else settings.model)
            while self.step < settings.steps:
                groups, rows = self.feed.next_rows(self._recipe, settings.temperature)
                write_version(
                    self.feed.version_folder(self.step + 1, "rolltap"), self.feed.settings.policy, self.feed.version + 1
                )
                if not self.feed.acknowledge(self.step + 1):
                    continue
                self.step += 1
                self._send(groups, rows)
                self.feed.push(self._weights(self.step), self.feed.version + 1)

    def _send(self, groups: Sequence[LeasedGroup], rows: Sequence[TrainedRow]) -> None:
        """Writes the files of this step, each in one rename, and a line in `metrics.jsonl`."""
        settings, folder = self.settings, self.settings.output_dir / "rollouts" / f"step_{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        samples = [sample_of(row, settings.temperature) for row in rows]
        grid = prepare_batch(samples, settings.seq_len, settings.ranks, build_bin_cost(None))
        self._log(groups, rows)
        for rank, micro_batches in enumerate(grid):
            temporary = folder / f"rank_{rank}.bin.tmp"
            temporary.write_bytes(msgspec.msgpack.encode(micro_batches))
            temporary.rename(temporary.with_suffix(""))

    def _log(self, groups: Sequence[LeasedGroup], rows: Sequence[TrainedRow]) -> None:
        """Writes a line in the form of prime-rl's `file` monitor."""
        staleness = [group.staleness for group in groups]
        line = {
            "step": self.step,
            "time": time.time(),
            "rolltap/version": self.feed.version,
            "rolltap/staleness_max": max(staleness),
            "rolltap/staleness_mean": sum(staleness) / len(staleness),
            "rolltap/trained_tokens": sum(row.tokens for row in rows),
        }
        with (self.settings.output_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _weights(self, step: int) -> Path:
        """Waits for the trainer's weights after `step`. Raises `TrainerError` after `weights_timeout` seconds."""
        folder = self.settings.output_dir / "broadcasts" / f"step_{step}"
        deadline = time.monotonic() + self.settings.weights_timeout
        while not (folder / "STABLE").exists():
            if time.monotonic() > deadline:
                raise TrainerError(f"prime-rl wrote no {folder}/STABLE in {self.settings.weights_timeout:g} s")
            time.sleep(0.05)
        return folder


def sample_of(row: TrainedRow, temperature: float) -> TrainingSample:
    """The whole segment in prime-rl's form: a token's values have the token's own index."""
    part = row.segment
    return TrainingSample(
        token_ids=part.token_ids.tolist(),
        mask=part.loss_mask.tolist(),
        logprobs=part.logprobs.tolist(),
        temperatures=[temperature] * len(part),
        env_name="rolltap",
        advantages=[row.advantage if trained else 0.0 for trained in part.loss_mask.tolist()],
    )


def _steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in folder.glob("step_*")]
