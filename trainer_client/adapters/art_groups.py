"""ART on leased groups: `TrajectoryGroup`s whose choices have the engine's own tokens, so that ART renders nothing.

A rollout is a `Trajectory`, its segments are histories, and each run of trained tokens is a `Choice` with the fields
that vLLM returns to ART: `prompt_token_ids`, `token_ids` and log-probs. ART makes rows of them, compares rewards within
the group, and weighs a rollout once, however many rows it has. A masked rollout has its reward and no choice: it counts
only in the baseline.

A backend can't undo a trained step, so groups are acknowledged before `train` is called. A run resumes from the
checkpoint of ART's step, which the engines then serve; groups of later steps are leased again.
"""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rolltap.contract.trainer import LeasedGroup, RolloutRecord
from rolltap.errors import TrainerError
from rolltap.trainer_client.adapters import ADAPTERS
from rolltap.trainer_client.adapters.feed import Feed, write_version
from rolltap.trainer_client.adapters.rows import check_images, trained_runs
from rolltap.trainer_client.data.scoring import baseline
from rolltap.trainer_client.recipes import make_recipe
from rolltap.types import Scoring, Segment

ADAPTERS["art"].check_installed()
import art  # noqa: E402
from art.trajectories import LegacyHistory  # noqa: E402
from art.utils.output_dirs import get_model_dir, get_step_checkpoint_dir  # noqa: E402
from openai.types.chat.chat_completion import Choice  # noqa: E402


@dataclass(frozen=True, slots=True)
class ArtSettings:
    """Number of steps, vocabulary size of the model in tokens, and the backend's options for each step."""

    vocabulary: int
    steps: int
    temperature: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)


class ArtTrainer:
    """Trains `model`, an `art.TrainableModel`, with `backend` from `feed`. `tokenizer` is the model's."""

    def __init__(self, model: Any, backend: Any, feed: Feed, settings: ArtSettings, tokenizer: Any) -> None:
        self.model, self.backend, self.feed, self.settings = model, backend, feed, settings
        self._tokenizer = tokenizer
        self._check = make_recipe("dr_grpo", {})

    async def train(self) -> None:
        """Trains from ART's current step to the settings' last step."""
        with self.feed.leasing(self.settings.vocabulary):
            step = await self.model.get_step()
            self.feed.connect(self.feed.version_folder(step) if step else None, step, self._tokenizer)
            self.feed.serve(self._weights(step))
            while step < self.settings.steps:
                groups, _ = self.feed.next_rows(self._check, self.settings.temperature)
                if not self.feed.acknowledge(step + 1):
                    continue
                version = self.feed.version + 1
                write_version(self.feed.version_folder(step + 1), self.feed.settings.policy, version)
                reply = await self.backend.train(self.model, groups_of(groups), **self.settings.options)
                if reply.step != step + 1 or reply.checkpoint_path is None:
                    raise TrainerError(f"ART made step {reply.step} of {step + 1}, checkpoint {reply.checkpoint_path}")
                step = reply.step
                self.feed.push(Path(reply.checkpoint_path), version)
                await self.model.log(split="train", metrics={**reply.metrics, **staleness_of(groups)}, step=step)

    def _weights(self, step: int) -> Path:
        """ART's checkpoint of the step; before there is one, the base model."""
        folder = Path(get_step_checkpoint_dir(get_model_dir(self.model, self.model.base_path), step))
        return folder if folder.exists() else Path(self.model.base_model)


def staleness_of(groups: Sequence[LeasedGroup]) -> dict[str, float]:
    """Of the step's groups, for ART's log."""
    staleness = [float(group.staleness) for group in groups]
    return {"rolltap/staleness_max": max(staleness), "rolltap/staleness_mean": sum(staleness) / len(staleness)}


def groups_of(groups: Sequence[LeasedGroup]) -> list[art.TrajectoryGroup]:
    """ART's groups, with the rollouts that are compared. `ConfigError` for groups that show images."""
    check_images(groups)
    return [
        art.TrajectoryGroup(
            [_trajectory(record, group) for record in baseline(group)], metadata={"group": group.group.id}
        )
        for group in groups
    ]


def _trajectory(record: RolloutRecord, group: LeasedGroup) -> art.Trajectory:
    parts = record.trajectory.segments if record.rollout.scoring is Scoring.SCORED else ()
    histories = [_choices(part) for part in parts if part.loss_mask.any()]
    first, *others = histories or [[]]
    return art.Trajectory(
        messages_and_choices=first,
        additional_histories=[LegacyHistory(messages_and_choices=one) for one in others],
        reward=record.reward or 0.0,
        initial_policy_version=group.oldest_version,
        final_policy_version=group.newest_version,
        metadata={"rollout": record.rollout.id},
    )


def _choices(part: Segment) -> list[Choice]:
    ids = part.token_ids.tolist()
    return [
        Choice.model_validate(
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": ""},
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []}
                        for token, logprob in zip(ids[begin:end], part.logprobs[begin:end].tolist(), strict=True)
                    ]
                },
                "prompt_token_ids": ids[:begin],
                "token_ids": ids[begin:end],
            }
        )
        for begin, end in trained_runs(part)
    ]
