"""Weights that a trainer sends to a real vLLM by its weight transfer API, over gloo.

Proven as those of a folder are: the log-probs of each version's tokens are those of that version's weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rolltap.errors import WeightsLost
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.push import WeightSender
from rolltap.trainer_client.settings import PushSettings

from .record import Reference, done, rows_of
from .servers import Proxy
from .test_weights import SWAP_AFTER, TOKENS, answer, endless, restored

__all__ = ["restored"]


@pytest.fixture
def client(restored: Proxy) -> TrainerClient:
    return restored.owner("tiny")


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    made = WeightSender(PushSettings(timeout_s=60), torch.device("cpu"))  # type: ignore[call-arg]
    yield made
    made.close()


def weights_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_weights_sent_in_mid_answer(
    restored: Proxy, client: TrainerClient, sender: WeightSender, tmp_path: Path
) -> None:
    old, new = endless(tmp_path / "old", 0.7), endless(tmp_path / "new", 0.4)
    first = client.policy("tiny").version + 1
    sender.push(client, "tiny", weights_of(old), first, "keep")
    session = restored.open_session("tiny")
    answer(restored, session, TOKENS, lambda: sender.push(client, "tiny", weights_of(new), first + 1, "keep"))
    (row,) = rows_of(restored.database, session["session_id"])
    completion = done(row)
    spans = [(span.version, span.start, span.end) for span in completion.versions]
    at = spans[0][2]
    assert SWAP_AFTER <= at < TOKENS
    assert spans == [(first, 0, at), (first + 1, at, TOKENS)]
    before, after = Reference(old).logprobs(row), Reference(new).logprobs(row)
    np.testing.assert_allclose(completion.logprobs[:at], before[:at], rtol=0, atol=1e-4)
    np.testing.assert_allclose(completion.logprobs[at:], after[at:], rtol=0, atol=1e-4)
    assert np.abs(before - after).max() > 0.1


def test_a_transfer_that_breaks_off_stands_still_until_a_whole_one(
    vllm_url: str, restored: Proxy, client: TrainerClient, sender: WeightSender, tmp_path: Path
) -> None:
    folder = endless(tmp_path / "new", 0.4)
    version = client.policy("tiny").version
    state = weights_of(folder)
    with pytest.raises(WeightsLost, match="waits for a whole push"):
        sender.push(client, "tiny", {**state, "model.layers.9.weight": torch.ones(2)}, version + 1, "keep")
    assert (client.policy("tiny").version, client.policy("tiny").paused) == (version, "lost")
    assert httpx.get(f"{vllm_url}/is_paused").json() == {"is_paused": True}
    sender.push(client, "tiny", state, version + 2, "keep")
    session = restored.open_session("tiny")
    answer(restored, session, 50)
    (row,) = rows_of(restored.database, session["session_id"])
    assert {span.version for span in done(row).versions} == {version + 2}
    np.testing.assert_allclose(done(row).logprobs, Reference(folder).logprobs(row), rtol=0, atol=1e-4)
