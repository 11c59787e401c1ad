"""A mixture's experts, from the embedded engine's passes through a lease into the trainer's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rolltap.demo.stack import Stack
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.data.scoring import trainable
from rolltap.trainer_client.model.network import PolicyNetwork, load_model

from ..unit.engine.test_model import mixture_folder
from ..unit.trainer_client.making import rows_of
from .test_sampling_trained import TRAIN, leased

POLICIES = {"mixture": {"pin": {"max_tokens": 24}, "train": TRAIN, "routed_experts": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture of experts with the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "mixture"
    vocabulary = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    mixture_folder(folder, normed=True, vocabulary=vocabulary)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(FOLDER / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("mixture"), folder, dict(POLICIES)) as running:
        yield running


def test_recorded_experts_are_the_trainers_own_and_are_replayed(stack: Stack, folder: Path) -> None:
    """Replayed they change nothing where both round alike; other experts would be another network."""
    group = leased(stack, "mixture", {}, {}, {})
    policy = PolicyNetwork(load_model(folder, torch.float32))
    shape = policy.mixture.shape
    trainable(group, policy.model.config.vocab_size, shape, all_routed=True)
    parts = [part for record in group.rollouts for part in record.trajectory.segments]
    assert [part.extras["routed_experts"].shape[1:] for part in parts] == [(2, 2)] * 3

    def mismatch(packer: Packer) -> float:
        batches = [collate(pack) for pack in packer(rows_of([group]))]
        with torch.no_grad():
            return max(float((policy(one).logprobs_M - one.logprobs_M).abs().max()) for one in batches)

    for packer in (Packer(4096, replay=True), Packer(4096, share=True, replay=True), Packer(1, replay=True)):
        assert mismatch(packer) < 1e-4
    for part in parts:
        experts = part.extras["routed_experts"]
        others = np.where(experts < 0, experts, (experts + 1) % shape.experts)
        object.__setattr__(part, "extras", {"routed_experts": others})
    assert mismatch(Packer(4096, replay=True)) > 0.01
