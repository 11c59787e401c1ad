"""Adapters as the trainer writes them, loaded by a real vLLM: log-probs are those of the merged weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openai
import pytest
import torch

from rolltap.engine.tiny import FOLDER
from rolltap.errors import EngineError
from rolltap.trainer_client.model.lora import add_adapters, merged, save_adapters
from rolltap.trainer_client.model.network import load_model
from rolltap.trainer_client.model.weights import save_model
from rolltap.trainer_client.settings import LoraSettings
from rolltap.types import VersionSpan

from .record import Reference, done, rows_of
from .servers import Proxy

TOKENS = 24


def adapted(folder: Path, seed: int) -> tuple[Path, Path]:
    """A random adapter of the tiny model, and the model that it makes."""
    settings = LoraSettings(rank=4)  # type: ignore[call-arg]
    model = load_model(FOLDER, torch.float32)
    add_adapters(model, settings)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = 0.05 * torch.randn(weight.shape, generator=generator)
    adapter, whole = folder / "adapter", folder / "model"
    for path in (adapter, whole):
        path.mkdir(parents=True)
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    save_adapters({name: weight for name, weight in state.items() if "lora_" in name}, settings, FOLDER, adapter)
    save_model(model, merged(state, settings), whole, FOLDER)
    return adapter, whole


def ask(session: dict[str, str]) -> None:
    with openai.OpenAI(base_url=session["base_url"] + "/v1", api_key=session["key"], max_retries=0) as client:
        question = "Copy apple.txt to pear.txt."
        client.chat.completions.create(
            model="adapted", messages=[{"role": "user", "content": question}], max_tokens=TOKENS
        )


def test_adapters_are_swapped_and_a_failed_one_changes_nothing(served: Proxy, tmp_path: Path) -> None:
    session = served.open_session("adapted")
    first, second = adapted(tmp_path / "first", 1), adapted(tmp_path / "second", 2)
    versions = [served.push("adapted", first[0], adapter=True)]
    ask(session)
    versions.append(served.push("adapted", second[0], adapter=True))
    ask(session)
    with pytest.raises(EngineError):
        served.push("adapted", tmp_path / "missing", adapter=True)
    ask(session)
    rows = rows_of(served.database, session["session_id"])
    assert versions == [1, 2]
    models = [Reference(first[1]), Reference(second[1]), Reference(second[1])]
    for row, version, model in zip(rows, [1, 2, 2], models, strict=True):
        assert done(row).versions == (VersionSpan(version, 0, len(done(row).output_ids)),)
        np.testing.assert_allclose(done(row).logprobs, model.logprobs(row), rtol=0, atol=1e-4)
        assert np.abs(done(row).logprobs - Reference(FOLDER).logprobs(row)).max() > 0.01
