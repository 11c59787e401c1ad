"""slime's samples, held against a copy of its field names: it is on no package index, so its own code is not run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query
from rolltap.trainer_client.adapters.slime_rewards import by_group
from rolltap.types import Finish, RolloutStatus

from ...trainers.sources import schema
from .world import World, reasons_of, rows_of, says, user

SAMPLE = {name for name, *_ in schema("slime").fields("Sample")}
"""Fields of `slime.utils.types.Sample` at the commit of the schema."""


def samples_in(out: Path, *groups: list[ExportItem]) -> list[dict[str, Any]]:
    """What `slime.observability.rollout_data_utils.load_debug_rollout_data` takes of the file."""
    with DatasetWriter(out, exporter_named("slime"), Query()) as writer:
        for group in groups:
            writer.add(group)
        (file,) = writer.finish()["files"]
    return torch.load(out / file["path"], weights_only=True)["samples"]


def test_a_file_holds_the_segments_as_samples(world: World, tmp_path: Path):
    items = [world.with_subagent(name).item(reward=reward, task="t") for name, reward in (("a", 1.0), ("b", 0.0))]
    samples = samples_in(tmp_path / "out", items)
    segments = [(item, segment) for item in items for segment in item.rows]
    for sample, (item, segment) in zip(samples, segments, strict=True):
        start = segment.prompt_length
        assert sample.keys() <= SAMPLE
        assert sample["tokens"] == segment.token_ids.tolist()
        assert sample["response_length"] == len(sample["loss_mask"]) == len(sample["rollout_log_probs"])
        assert sample["loss_mask"] == segment.loss_mask[start:].tolist()
        assert np.array_equal(np.asarray(sample["rollout_log_probs"], np.float32), segment.logprobs[start:])
        assert sample["weight_versions"] == [str(one) for one in np.unique(segment.versions[segment.loss_mask])]
        assert (sample["reward"], sample["status"]) == (item.reward, "completed")
        assert sample["prompt"][-1]["role"] == "user"
    assert len({sample["group_index"] for sample in samples}) == 1
    assert len({sample["rollout_id"] for sample in samples}) == 2
    assert len({sample["index"] for sample in samples}) == len(samples)
    assert samples_in(tmp_path / "again", items) == samples


def test_what_can_not_be_trained_is_counted(world: World):
    script = world.script("cut")
    script.ask([user("Count.")], says("one two"), finish=Finish.LENGTH)
    cut = list(exporter_named("slime").rows([script.item(reward=1.0)]))
    assert reasons_of(cut) == ["no tokens that may be trained"]
    assert reasons_of(list(exporter_named("slime").rows([world.solved("s").item()]))) == ["no reward"]


def test_a_rollout_that_ran_out_of_time_is_truncated(world: World):
    item = world.solved("s").item(reward=0.0, task="t")
    assert item.rollout is not None
    late = replace(item, rollout=replace(item.rollout, status=RolloutStatus.TIMED_OUT))
    (row,) = rows_of(list(exporter_named("slime").rows([late])))
    assert row["status"] == "truncated"


def test_the_manifest_counts_the_tokens_and_the_card_says_how_to_read_them(world: World, tmp_path: Path):
    item = world.solved("s").item(reward=1.0, task="t")
    with DatasetWriter(tmp_path / "out", exporter_named("slime"), Query()) as writer:
        writer.add([item])
        manifest = writer.finish()
    (segment,) = item.rows
    trained = int(segment.loss_mask.sum())
    assert manifest["splits"]["train"] == {"rows": 1, "tasks": 1, "tokens": len(segment), "trained": trained}
    assert "torch.load" in (tmp_path / "out" / "README.md").read_text()


def test_an_export_that_ends_early_leaves_nothing(world: World, tmp_path: Path):
    def interrupted() -> None:
        with DatasetWriter(tmp_path / "out", exporter_named("slime"), Query()) as writer:
            writer.add([world.solved("s").item(reward=1.0, task="t")])
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@dataclass
class Sampled:
    """A `Sample`, as far as rewards are made of it."""

    group_index: int
    rollout_id: int | None
    reward: float
    index: int = 0

    def get_reward_value(self, args: Any) -> float:
        return self.reward


def arguments(**changes: Any) -> SimpleNamespace:
    chosen = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": False}
    return SimpleNamespace(**(chosen | changes))


def test_rewards_are_centred_over_the_rollouts_of_a_group_however_many_samples_they_have():
    samples = [Sampled(7, 1, 1.0), Sampled(7, 1, 1.0), Sampled(7, 2, 0.0), Sampled(8, 3, 3.0), Sampled(8, 4, 1.0)]
    own, trained = by_group(arguments(), samples)
    assert own == [1.0, 1.0, 0.0, 3.0, 1.0]
    assert trained == [0.5, 0.5, -0.5, 1.0, -1.0]


def test_rewards_of_equal_groups_are_what_slime_makes_of_them():
    """Its own arithmetic, of `RolloutManager._post_process_rewards`, for as many samples as it expects."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.2, 0.4, 0.9, 0.5]])
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    theirs = (centred / (centred.std(dim=-1, keepdim=True) + 1e-6)).flatten().tolist()
    samples = [Sampled(place // 4, None, reward, place) for place, reward in enumerate(rewards.flatten().tolist())]
    assert by_group(arguments(grpo_std_normalization=True), samples)[1] == pytest.approx(theirs, abs=1e-6)
    assert by_group(arguments(advantage_estimator="ppo"), samples)[1] == rewards.flatten().tolist()
    assert by_group(arguments(), [Sampled(1, 1, 0.5)])[1] == [0.0]
