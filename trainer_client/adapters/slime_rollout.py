"""slime on leased groups: a rollout function and a data source, called by slime's own rollout manager.

    --rollout-function-path rolltap.trainer_client.adapters.slime_rollout.generate_rollout
    --data-source-path rolltap.trainer_client.adapters.slime_rollout.LeasedSource
    --custom-reward-post-process-path rolltap.trainer_client.adapters.slime_rollout.advantages

slime calls the source's `load` before its first step, and its `save` after it wrote a checkpoint and the Hugging Face
folder, which `save` pushes. Groups are acknowledged before their samples are returned. A sample is a segment; those of
a rollout share a `rollout_id`, so slime's mean over rollouts weighs the rollout once. Advantages are a rolltap
recipe's. slime's own engines are not used (`--debug-train-only`).
"""

# pyright: reportMissingImports=false
# slime is on no package index; the tests run it from its source.

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from rolltap.contract.trainer import LeasedGroup
from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed, write_version
from rolltap.trainer_client.adapters.rows import TrainedRow
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import NO_VERSION

ADAPTERS["slime"].check_installed()
from slime.rollout.base_types import RolloutFnTrainOutput  # noqa: E402
from slime.rollout.data_source import DataSource  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

ALLOWED: dict[str, tuple[Any, ...]] = {
    "save_interval": (1,),  # each step is a weight version
    "rollout_global_dataset": (True,),  # else slime neither loads nor saves its data source
    "advantage_estimator": ("grpo", "gspo", "cispo"),  # those that use a sample's reward as its advantage
    "normalize_advantages": (False,),
    "rollout_top_p": (1.0,),
    "custom_reward_post_process_path": (f"{__name__}.advantages",),
}
"""slime's arguments, and the values that train each row with its recipe's advantage."""


class LeasedSource(DataSource):
    """The feed of slime's run. Its settings are attributes of slime's arguments (`--custom-config-path`):
    `rolltap_policy`, `rolltap_recipe` (grpo), and `rolltap_weights`, a folder that the engines see."""

    def __init__(self, args: Any) -> None:
        check_arguments(args)
        self.args = args
        settings = FeedSettings(args.rolltap_policy, args.rollout_batch_size, Path(args.rolltap_weights))
        url, key = os.environ["ROLLTAP_TRAINER_URL"], os.environ["ROLLTAP_TRAINER_KEY"]
        self.feed = open_feed(url, key, settings, trainer="slime", out=Path(args.save))
        self.recipe = make_recipe(getattr(args, "rolltap_recipe", "grpo"), {})
        self.vocabulary = AutoConfig.from_pretrained(args.hf_checkpoint).vocab_size

    def load(self, rollout_id: int | None = None) -> None:
        """Called by slime before the step after `rollout_id`, which is -1 for a new run."""
        step = 0 if rollout_id is None else rollout_id + 1
        tokenizer = AutoTokenizer.from_pretrained(self.args.hf_checkpoint)
        self.feed.connect(self.feed.version_folder(step, "rolltap") if step else None, step, tokenizer)
        self.feed.serve(self._weights(step - 1) if step else Path(self.args.hf_checkpoint))

    def save(self, rollout_id: int) -> None:
        """Called by slime after it saved the weights of this step. Pushes them."""
        self.feed.push(self._weights(rollout_id), self.feed.version + 1)

    def next_step(self, rollout_id: int) -> tuple[Sequence[LeasedGroup], list[TrainedRow]]:
        """The step's groups, acknowledged, and their rows."""
        with self.feed.leasing(self.vocabulary):
            while True:
                groups, rows = self.feed.next_rows(self.recipe, self.args.rollout_temperature)
                write_version(
                    self.feed.version_folder(rollout_id + 1, "rolltap"),
                    self.feed.settings.policy,
                    self.feed.version + 1,
                )
                if self.feed.acknowledge(rollout_id + 1):
                    return groups, rows

    def _weights(self, rollout_id: int) -> Path:
        return Path(self.args.save_hf.format(rollout_id=rollout_id))

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        raise ConfigError("there are no prompts: harnesses have played the rollouts")

    add_samples = get_samples  # samples can't be returned: their groups are acknowledged

    def __len__(self) -> int:
        raise ConfigError("groups have no end: set --num-rollout")


def generate_rollout(args: Any, rollout_id: int, data_source: LeasedSource, evaluation: bool) -> RolloutFnTrainOutput:
    """The next step's samples, group by group. Sets `args.global_batch_size` to the number of their rollouts, so that
    slime trains all of them in one step."""
    if evaluation:
        raise ConfigError("this rollout function gives training batches only: leave --eval-interval out")
    groups, rows = data_source.next_step(rollout_id)
    args.global_batch_size = len({row.rollout for row in rows})
    group_numbers = {group.group.id: number for number, group in enumerate(groups)}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row.rollout for row in rows))}
    rewards = {record.rollout.id: record.reward for group in groups for record in group.rollouts}
    samples: list[list[Sample]] = [[] for _ in groups]
    for index, row in enumerate(rows):
        group = group_numbers[row.group]
        samples[group].append(sample_of(row, (group, numbers[row.rollout], index), rewards[row.rollout]))
    staleness = [group.staleness for group in groups]
    metrics = {"staleness_max": max(staleness), "staleness_mean": sum(staleness) / len(staleness)}
    metrics = {f"rolltap/{name}": value for name, value in {"version": data_source.feed.version, **metrics}.items()}
    return RolloutFnTrainOutput(samples=[one for one in samples if one], metrics=metrics)


def sample_of(row: TrainedRow, numbers: tuple[int, int, int], reward: float | None) -> Sample:
    """The whole segment in slime's form. `numbers`: of the group, the rollout and the sample within the step."""
    part, start = row.segment, row.segment.prompt_length
    versions = sorted(set(part.versions[part.loss_mask].tolist()) - {NO_VERSION})
    group, rollout, index = numbers
    return Sample(
        group_index=group,
        index=index,
        rollout_id=rollout,
        tokens=part.token_ids.tolist(),
        response_length=len(part) - start,
        reward=reward or 0.0,
        loss_mask=part.loss_mask[start:].astype(np.int32).tolist(),
        rollout_log_probs=part.logprobs[start:].tolist(),
        weight_versions=[str(version) for version in versions],
        status=Sample.Status.COMPLETED,
        metadata={"advantage": row.advantage, "group": row.group, "rollout": row.rollout},
    )


def advantages(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """The samples' rewards, and the recipe's advantages, on which slime trains."""
    return [float(one.reward) for one in samples], [one.metadata["advantage"] for one in samples]


def check_arguments(args: Any) -> None:
    """Raises `ConfigError` for arguments of slime that would leave out rows or change the training."""
    for name, allowed in ALLOWED.items():
        if getattr(args, name, None) not in allowed:
            raise ConfigError(f"slime's {name} is {getattr(args, name, None)!r}: it has to be {allowed}")
    if not args.save or not args.save_hf or not args.num_rollout:
        raise ConfigError("set --save, --save-hf FOLDER/{rollout_id} and --num-rollout")
