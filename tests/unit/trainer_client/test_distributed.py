"""Two ranks under torchrun train as one process, all weights or adapters; they end together when one is killed, and the
run goes on from its checkpoint on any number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rolltap.trainer_client.data.collate import collate, empty_batch
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.run.loop import run
from rolltap.trainer_client.run.worker import deal
from rolltap.trainer_client.settings import load_trainer_settings

from .making import model_folder, network, random_group, rows_of
from .plane import KEY, Plane, running

SETTINGS = """
[trainer]
groups = 2
checkpoints_kept = 9
loss = {kl = 0.1}
optimiser = {lr = 1e-4, epochs = 2, minibatches = 2}
compute = {device = "cpu", gradient_checkpointing = true}
"""


def offer(plane: Plane, names: range) -> None:
    plane.offer(*(random_group(f"g{index}", [1.0, 0.0, 0.5, 0.2], seed=index) for index in names))


def one_process(url: str, folder: Path, out: Path, steps: int) -> None:
    given = {"url": url, "key": KEY, "policy": "policy", "model": folder / "model", "out": out, "steps": steps}
    run(load_trainer_settings(folder / "rolltap.toml", **given))


@contextmanager
def two_ranks(url: str, folder: Path, out: Path, steps: int) -> Iterator[subprocess.Popen[str]]:
    """`rolltap train` on two ranks; what is left of it is ended at last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "rolltap", "train", "--config", str(folder / "rolltap.toml"), "--policy", "policy"]
    command += ["--url", url, "--key", KEY, "--model", str(folder / "model"), "--out", str(out), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, **output) as process:
        try:
            yield process
        finally:
            process.terminate()  # which torchrun passes on


def finish(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate()
    assert process.returncode == 0, said


def kill_follower(process: subprocess.Popen[str]) -> None:
    """Rank 1 of torchrun's children."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
            os.kill(int(child), signal.SIGKILL)


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The optimiser's tensors by weight and name; `exp_avg` of the first step is a tenth of the gradient."""
    return {
        f"{weight}/{name}": value
        for weight, values in state["state"].items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=1e-4, msg=name)


def assert_same_checkpoints(*outs: Path) -> None:
    for step in (1, 2, 3):
        folders = [out / "checkpoints" / f"step-{step}" for out in outs]
        states = [torch.load(folder / "optimiser.pt") for folder in folders]
        assert_same(*(tensors(state) for state in states))
        assert_same(*(state.get("adapters", {}) for state in states))
        assert_same(*(load_file(folder / "model.safetensors") for folder in folders))


@pytest.mark.acceptance
@pytest.mark.timeout(300)
def test_two_ranks_train_as_one_and_go_on_after_a_kill(tmp_path: Path) -> None:
    """25 CPU seconds: each of seven trainers imports torch."""
    (tmp_path / "rolltap.toml").write_text(SETTINGS)
    model_folder(tmp_path / "model")
    outs = tmp_path / "ranks", tmp_path / "one"
    plane = Plane()
    with running(plane) as url:
        offer(plane, range(4))
        with two_ranks(url, tmp_path, outs[0], steps=3) as process:
            with plane.changed:
                assert plane.changed.wait_for(lambda: plane.version == 2 and plane.paused is None, timeout=120)
            kill_follower(process)
            said, _ = process.communicate()
            assert process.returncode != 0, said
        offer(plane, range(4, 6))
        with two_ranks(url, tmp_path, outs[0], steps=3) as process:
            finish(process)
        assert plane.acked == {f"g{index}": 1 + index // 2 for index in range(6)}
        plane.forget()
        offer(plane, range(6))
        one_process(url, tmp_path, outs[1], steps=3)
    assert_same_checkpoints(*outs)


@pytest.mark.acceptance
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks_of_steps", "lora"),
    [((1, 2, 1), {}), ((2, 1, 2), {"rank": 4, "push": "adapter"})],
    ids=["all weights", "adapters"],
)
def test_a_run_that_changes_its_number_of_ranks_ends_in_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks_of_steps: tuple[int, ...], lora: dict[str, Any]
) -> None:
    """12 to 25 CPU seconds: each trainer imports torch."""
    (tmp_path / "rolltap.toml").write_text(SETTINGS)
    for name, value in lora.items():
        monkeypatch.setenv(f"ROLLTAP_TRAINER__LORA__{name.upper()}", str(value))
    model_folder(tmp_path / "model")
    outs = tmp_path / "changing", tmp_path / "one"
    plane = Plane()
    with running(plane) as url:
        for step, ranks in enumerate(ranks_of_steps, start=1):
            offer(plane, range(2 * step - 2, 2 * step))
            if ranks == 1:
                one_process(url, tmp_path, outs[0], step)
            else:
                with two_ranks(url, tmp_path, outs[0], step) as process:
                    finish(process)
        plane.forget()
        offer(plane, range(6))
        one_process(url, tmp_path, outs[1], steps=3)
    assert_same_checkpoints(*outs)
    if lora:
        assert_same(*(load_file(out / "weights" / "step-3" / "adapter_model.safetensors") for out in outs))


def test_ranks_get_as_many_batches_of_about_the_same_length() -> None:
    rows = rows_of([random_group("g", [1.0, 0.0] * 5, seed=0)])
    batches = [collate(pack) for pack in Packer(60, ranks=4)(rows)]
    shares = deal(batches, 4)
    assert {len(share) for share in shares} == {-(-len(batches) // 4)}
    assert sum(batch.trained_tokens for share in shares for batch in share) == sum(
        int(row.segment.loss_mask.sum()) for row in rows
    )
    for batches_of_a_pass in list(zip(*shares, strict=True))[:-1]:
        sizes = [batch.tokens for batch in batches_of_a_pass]
        assert max(sizes) <= 60
        assert min(sizes) >= max(sizes) / 2


def test_an_empty_batch_makes_a_backward_pass_through_every_weight_and_changes_none() -> None:
    policy = network()
    policy(empty_batch()).logprobs_M.sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in policy.parameters())
