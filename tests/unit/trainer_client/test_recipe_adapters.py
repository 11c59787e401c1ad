"""Every recipe with adapters: a run that goes on from its checkpoint ends as one without a break."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .making import recipe_names
from .plane import Plane, running
from .test_recipe_contract import made, offer, run, state_of, tagged_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """More of them only wait for each other on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tagged_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if at % 4 else ()) for at, name in enumerate(recipe_names())]
)
def test_a_resumed_run_ends_as_one_without_a_break(name: str, model: Path, tmp_path: Path) -> None:
    """The second step's checkpoint is lost, and the step made again: weights, adapters, heads and networks agree."""
    plane = Plane()
    with running(plane) as url:
        settings = made(name, model, tmp_path, url=url, lora={"rank": 2})
        offer(plane, 0, 4)
        straight = run(settings)
        folder = tmp_path / "checkpoints" / "step-2"
        weights, saved = load_file(folder / "model.safetensors"), torch.load(folder / "optimiser.pt")
        shutil.rmtree(folder)
        resumed = run(settings)
    start = load_file(model / "model.safetensors")
    assert any(not torch.equal(start[key], weights[key]) for key in start)
    torch.testing.assert_close(load_file(folder / "model.safetensors"), weights, atol=1e-6, rtol=1e-5)
    again = torch.load(folder / "optimiser.pt")
    assert again.keys() == saved.keys()
    for part in saved.keys() - {"recipe", "param_groups"}:
        torch.testing.assert_close(again[part], saved[part], atol=1e-6, rtol=1e-5, msg=part)
    assert state_of(resumed) == pytest.approx(state_of(straight))
