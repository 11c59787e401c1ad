"""Groups, rollouts and segments made by hand, and the smallest model that can be trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, Qwen3Config

from rolltap.contract.trainer import LeasedGroup, RolloutRecord
from rolltap.extras import known_names
from rolltap.trainer_client.data.packing import PackedRow
from rolltap.trainer_client.model import attention
from rolltap.trainer_client.model.network import PolicyNetwork
from rolltap.trainer_client.recipes import ENTRY_POINTS, RECIPES, make_recipe
from rolltap.trainer_client.run.planning import make_step, rows_to_train
from rolltap.trainer_client.settings import LossSettings
from rolltap.types import NO_VERSION, Group, GroupStatus, Rollout, RolloutStatus, Scoring, Segment, Task, Trajectory

VOCABULARY = 64


def recipe_names() -> list[str]:
    """Our recipes and those of installed packages."""
    return known_names(RECIPES, ENTRY_POINTS)


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def network(seed: int = 0) -> PolicyNetwork:
    """A fresh random policy in float32."""
    import torch

    torch.manual_seed(seed)
    attention.register()
    return PolicyNetwork(AutoModelForCausalLM.from_config(config(), attn_implementation=attention.NAME))


def model_folder(folder: Path) -> Path:
    """A folder with a random model, as `rolltap train --model` takes it."""
    network().model.save_pretrained(folder)
    return folder


def segment(
    token_ids: Sequence[int], trained: Sequence[int], *, version: int = 0, logprob: float | None = None
) -> Segment:
    """A segment whose places `trained` carry loss; log-probs of a uniform policy unless given."""
    mask = np.zeros(len(token_ids), bool)
    mask[list(trained)] = True
    value = -np.log(VOCABULARY) if logprob is None else logprob
    return Segment(
        np.asarray(token_ids, np.int32),
        mask,
        np.where(mask, value, 0.0).astype(np.float32),
        np.where(mask, version, NO_VERSION).astype(np.int32),
        (),
    )


def random_segment(rng: np.random.Generator, prefix: Sequence[int], sampled: int, *, version: int = 0) -> Segment:
    """`prefix` as prompt and `sampled` trained tokens, with log-probs near a uniform policy's."""
    ids = np.concatenate([np.asarray(prefix, np.int64), rng.integers(0, VOCABULARY, sampled)])
    made = segment(ids.tolist(), range(len(prefix), len(ids)), version=version)
    noise = np.where(made.loss_mask, rng.normal(0, 0.2, len(made)), 0).astype(np.float32)
    return Segment(made.token_ids, made.loss_mask, made.logprobs + noise, made.versions, ())


def record(
    group: str, index: int, segments: Sequence[Segment], reward: float | None, scoring: Scoring = Scoring.SCORED
) -> RolloutRecord:
    name = f"{group}-r{index}"
    rollout = Rollout(name, group, "task", index, RolloutStatus.SUCCEEDED, scoring=scoring)
    return RolloutRecord(rollout, Trajectory(f"session-{name}", tuple(segments), (), {}), reward)


def group(
    name: str, records: Sequence[RolloutRecord], *, oldest: int = 0, newest: int = 0, staleness: int = 0
) -> LeasedGroup:
    rollouts = tuple(one.rollout for one in records)
    return LeasedGroup(
        Group(name, "task", "policy", GroupStatus.LEASED, rollouts),
        Task("task", "do it"),
        tuple(records),
        oldest,
        newest,
        staleness,
    )


def rows_of(groups: Sequence[LeasedGroup], recipe: str = "grpo", **loss: Any) -> list[PackedRow]:
    """The rows that `recipe` trains of a step, with their credit."""
    settings = LossSettings(**loss)
    step = make_step(groups, settings)
    return rows_to_train(step, make_recipe(recipe, {}).credit(step), settings, zeros=True)


def random_group(name: str, rewards: Sequence[float], seed: int = 0, *, version: int = 0) -> LeasedGroup:
    """A rollout a reward, all on one prompt of 20 tokens, each with 5 to 15 sampled tokens."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCABULARY, 20).tolist()
    records = [
        record(name, index, [random_segment(rng, prompt, int(rng.integers(5, 16)), version=version)], reward)
        for index, reward in enumerate(rewards)
    ]
    return group(name, records, oldest=version, newest=version)
