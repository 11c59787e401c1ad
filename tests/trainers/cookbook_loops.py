"""Run in an environment with tinker-cookbook: its loops, unmodified, train and sample on our own service.

Its supervised recipe (`recipes/sl_loop.py`) and its RL trainer (`rl/train.py`). They know models by the hub's names, so
the tiny model is served under one; the data are ours, in place of data sets of the hub.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chz  # type: ignore[import-not-found]
import datasets
import tinker
from tinker_cookbook import model_info, renderers, tokenizer_utils  # type: ignore[import-not-found]
from tinker_cookbook.recipes import sl_loop  # type: ignore[import-not-found]
from tinker_cookbook.rl import train  # type: ignore[import-not-found]
from tinker_cookbook.rl.types import (  # type: ignore[import-not-found]
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from transformers import AutoTokenizer

from rolltap.engine.tiny import FOLDER

from ..unit.trainer_client.tinkering import KEY, Service, serving

NAME = "Qwen/Qwen3-8B"
LIKED = 440
"""Ids below are what the RL task pays for: half of the vocabulary."""


class LowIds(Env):
    """One reply; its reward is the share of its ids that are low."""

    def __init__(self, renderer: Any, number: int) -> None:
        self._renderer, self._number = renderer, number

    async def initial_observation(self) -> Any:
        messages = [{"role": "user", "content": f"say something, please: {self._number}"}]
        return self._renderer.build_generation_prompt(messages), self._renderer.get_stop_sequences()

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        reward = sum(token < LIKED for token in action) / len(action)
        return StepResult(reward, True, tinker.ModelInput.empty(), [])


class LowIdsGroup(EnvGroupBuilder):
    def __init__(self, renderer: Any, number: int) -> None:
        self._renderer, self._number = renderer, number

    async def make_envs(self) -> Sequence[Env]:
        return [LowIds(self._renderer, self._number) for _ in range(8)]


class LowIdsData(RLDataset):
    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        return [LowIdsGroup(self._renderer, 4 * index + number) for number in range(4)]

    def __len__(self) -> int:
        return 8


@chz.chz
class LowIdsBuilder(RLDatasetBuilder):
    async def __call__(self) -> tuple[RLDataset, None]:
        tokenizer = tokenizer_utils.get_tokenizer(NAME)
        return LowIdsData(renderers.get_renderer(model_info.get_recommended_renderer_name(NAME), tokenizer)), None


def conversations(*_: Any, **__: Any) -> datasets.DatasetDict:
    """In place of the hub's data set of the recipe."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"count to {at % 5}"},
                {"role": "assistant", "content": "one two three"},
            ]
        }
        for at in range(64)
    ]
    return datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})


def metrics(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line[name] for line in map(json.loads, lines) if name in line]


def supervised(service: Service, out: Path) -> int:
    datasets.load_dataset = conversations  # type: ignore[assignment]
    config = sl_loop.Config(
        base_url=service.url,
        log_path=str(out),
        model_name=NAME,
        batch_size=8,
        learning_rate=1e-2,
        max_length=256,
        lora_rank=8,
        save_every=3,
        max_steps=8,
    )
    sl_loop.main(config)
    losses = metrics(out, "train_mean_nll")
    assert losses[-1] < 0.5 * losses[0], losses
    saved = sorted(path.name for path in service.endpoint.library.root.glob("*/*/*"))
    assert saved == ["000003", "000006", "final", "final"]
    print(f"sl_loop: loss {losses[0]:.2f} to {losses[-1]:.2f}")
    return len(losses)


def reinforced(service: Service, out: Path) -> int:
    config = train.Config(
        base_url=service.url,
        log_path=str(out),
        model_name=NAME,
        dataset_builder=LowIdsBuilder(),
        learning_rate=1e-2,
        max_tokens=12,
        lora_rank=8,
        save_every=4,
        eval_every=0,
        loss_fn="ppo",
        recipe_name="recipe_test",
        renderer_name=model_info.get_recommended_renderer_name(NAME),
    )
    asyncio.run(train.main(config))
    rewards = metrics(out, "env/all/reward/total")
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.1, rewards
    (apart,) = {max(metrics(out, "optim/kl_sample_train_v1")[:1])}
    assert abs(apart) < 1e-3, apart
    print(f"rl/train: reward {rewards[0]:.2f} to {rewards[-1]:.2f}, sampler and trainer {apart:.1e} apart")
    return len(rewards)


def main() -> None:
    os.environ["TINKER_API_KEY"] = KEY
    tokenizer_utils.register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(FOLDER))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with serving(FOLDER, root / "supervised", NAME) as service:
            first = supervised(service, root / "sl")
        with serving(FOLDER, root / "reinforced", NAME) as service:
            second = reinforced(service, root / "rl")
    print(f"sl_loop made {first} steps and rl/train {second}, and both learned")


if __name__ == "__main__":
    main()
