"""prime-rl's trainer on leased groups: this stands in its orchestrator's place, on the filesystem transport.

A step is `rollouts/step_N/rank_R.bin`, which prime-rl's own packer fills with segments; the weights of the step before
are awaited in `broadcasts/step_N`, pushed to the engines, and groups are leased then. Groups are acknowledged before
the step's files appear. prime-rl's mean is over all trained tokens, so rows of a rollout weigh as their tokens do.

Started again, it goes on from the newest checkpoint of the trainer and removes what was sent after it: start it before
the trainer.
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

from rolltap.contract.leases import LeasedGroup
from rolltap.errors import TrainerError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed, write_version
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.trainer_client.find_recipe import make_recipe

ADAPTERS["prime-rl"].check_installed()
from prime_rl.trainer.batch import build_bin_cost, prepare_batch  # noqa: E402
from prime_rl.transports.rollouts.types import TrainingSample  # noqa: E402


@dataclass(frozen=True, slots=True)
class PrimeSettings:
    """What the trainer has in its own settings: its `output_dir`, `model.seq_len`, `max_steps`, and how many
    data-parallel `ranks` it has. `model` is the folder that it starts from, of a config with `vocabulary` tokens."""

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
        """Up to the last step; returns when its weights are served."""
        chosen = self.settings
        for folder in ("rollouts", "broadcasts"):
            for step in _steps(chosen.output_dir / folder):
                if step > self.step:
                    shutil.rmtree(chosen.output_dir / folder / f"step_{step}")
        with self.feed.leasing(chosen.vocabulary, longest=chosen.seq_len):
            self.feed.connect(self._note(self.step) if self.step else None, self.step, self._tokenizer)
            self.feed.serve(self._weights(self.step) if self.step else chosen.model)
            while self.step < chosen.steps:
                groups, rows = self.feed.next_rows(self._recipe, chosen.temperature)
                write_version(self._note(self.step + 1), self.feed.settings.policy, self.feed.version + 1)
                if not self.feed.acknowledge(self.step + 1):
                    continue
                self.step += 1
                self._send(groups, rows)
                self.feed.push(self._weights(self.step), self.feed.version + 1)

    def _send(self, groups: Sequence[LeasedGroup], rows: Sequence[TrainedRow]) -> None:
        """The files of this step, each in one rename, and a line in `metrics.jsonl`."""
        chosen, folder = self.settings, self.settings.output_dir / "rollouts" / f"step_{self.step}"
        folder.mkdir(parents=True, exist_ok=True)
        samples = [sample_of(row, chosen.temperature) for row in rows]
        grid = prepare_batch(samples, chosen.seq_len, chosen.ranks, build_bin_cost(None))
        self._log(groups, rows)
        for rank, micro_batches in enumerate(grid):
            making = folder / f"rank_{rank}.bin.tmp"
            making.write_bytes(msgspec.msgpack.encode(micro_batches))
            making.rename(making.with_suffix(""))

    def _log(self, groups: Sequence[LeasedGroup], rows: Sequence[TrainedRow]) -> None:
        """A line as prime-rl's `file` monitor writes them."""
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
        """Waits for the weights that the trainer has after `step`; `TrainerError` if they don't come."""
        folder = self.settings.output_dir / "broadcasts" / f"step_{step}"
        deadline = time.monotonic() + self.settings.weights_timeout
        while not (folder / "STABLE").exists():
            if time.monotonic() > deadline:
                raise TrainerError(f"prime-rl wrote no {folder}/STABLE in {self.settings.weights_timeout:g} s")
            time.sleep(0.05)
        return folder

    def _note(self, step: int) -> Path:
        """The folder that says which weight version the trainer's checkpoint of `step` is."""
        return self.feed.out / f"rolltap-{step}"


def sample_of(row: TrainedRow, temperature: float) -> TrainingSample:
    """The whole segment as prime-rl takes it: a token's values stand at the token itself."""
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
