"""Recipes with heads, readings and networks of their own: on two ranks (FSDP2) and with adapters, as in one process."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from .acting import acted_group
from .making import model_folder, recipe_names
from .plane import Plane, running
from .test_distributed import finish, one_process, two_ranks
from .test_recipe_contract import tagged_model

ROOT = Path(__file__).parents[3]

SETTINGS = """
[trainer]
recipe = "{recipe}"
groups = 2
optimiser = {{lr = 1e-3}}
compute = {{device = "cpu", token_budget = 90}}
"""


def offer(plane: Plane, start: int) -> None:
    plane.offer(*(acted_group(f"g{index}", index) for index in range(start, start + 2)))


def checkpoint(out: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = out / "checkpoints" / "step-2"
    return load_file(folder / "model.safetensors"), torch.load(folder / "optimiser.pt")


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("recipe", ["epo", "ppo", "seeupo", "tt_opd"])
def test_two_ranks_learn_as_one_process_does(recipe: str, tmp_path: Path) -> None:
    """The first step on two ranks, the second on one: what is saved of heads and networks fits both."""
    (tmp_path / "rolltap.toml").write_text(SETTINGS.format(recipe=recipe))
    model_folder(tmp_path / "model")
    outs = tmp_path / "ranks", tmp_path / "one"
    plane = Plane()
    with running(plane) as url:
        offer(plane, 0)
        with two_ranks(url, tmp_path, outs[0], steps=1) as process:
            finish(process)
        offer(plane, 2)
        one_process(url, tmp_path, outs[0], 2)
        plane.forget()
        offer(plane, 0)
        offer(plane, 2)
        one_process(url, tmp_path, outs[1], 2)
    (weights, state), (plain_weights, plain_state) = (checkpoint(out) for out in outs)
    assert_close(plain_weights, weights)
    for name in plain_state.keys() - {"state", "param_groups", "recipe"}:
        assert_close(plain_state[name], state[name])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_recipe_has_the_same_gradient_on_two_ranks(tmp_path: Path) -> None:
    """60 CPU seconds: one start of torchrun for all of them, with all weights and with adapters."""
    model = tagged_model(tmp_path / "model")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", f"{__package__}.ranked_recipes", str(model), str(tmp_path), *recipe_names()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.strip().splitlines()]
    differences = {(name, int(rank)): float(value) for name, rank, value in lines}
    assert differences.keys() == set(product(recipe_names(), (0, 2)))
    assert {name: value for name, value in differences.items() if value > 1e-4} == {}
