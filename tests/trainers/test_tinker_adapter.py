"""What the Tinker adapter has beside the contract: services with random adapters, losses that it refuses."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from rolltap.errors import ConfigError
from rolltap.trainer_client.adapters.feed import FeedSettings, open_feed
from rolltap.trainer_client.adapters.tinker_service import TinkerSettings, TinkerTrainer

from ..unit.trainer_client.making import VOCABULARY
from ..unit.trainer_client.plane import KEY, Plane
from .driver import Killed, Run
from .world import groups


class RandomAdapter:
    """A client of a service that gives peft adapters: each new one has another random A, and B is zero."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._a = torch.randn(4, 8)

    def get_tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self._run.model)

    def save_weights_for_sampler(self, name: str) -> Future[Any]:
        folder = self._run.out / f"{name}-{id(self)}"
        folder.mkdir(parents=True)
        weights = {"q.lora_A.weight": self._a, "q.lora_B.weight": torch.zeros(8, 4)}
        save_file(weights, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text("{}")
        saved: Future[Any] = Future()
        saved.set_result(SimpleNamespace(path=str(folder)))
        return saved

    def forward_backward(self, *_: Any) -> Any:
        raise Killed


def trainer_of(run: Run, **settings: Any) -> TinkerTrainer:
    feed = open_feed(
        run.url, KEY, FeedSettings("policy", 2, run.out / "weights", wait=0.2), trainer="theirs", out=run.out
    )
    clients: list[RandomAdapter] = []  # kept, so that no two have the same id

    def opened(state: str | None) -> RandomAdapter:
        clients.append(RandomAdapter(run))
        return clients[-1]

    return TinkerTrainer(opened, feed, TinkerSettings(VOCABULARY, 1, **settings), Path)


def test_a_run_killed_in_its_first_step_starts_again_with_another_adapter(plane: Plane, run: Run) -> None:
    trainers = []
    for start in range(3):
        plane.offer(*groups(2, start * 2))
        trainers.append(trainer_of(run))
        with pytest.raises(Killed):
            trainers[-1].train()
    assert [version for _, version in plane.pushed] == [0, 1, 2]


def test_a_loss_that_trains_tokens_of_the_context_is_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="'dro' would train tokens that the agent did not sample"):
        trainer_of(run, loss="dro")
