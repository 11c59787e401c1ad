"""Checkpoints on disk: whole or not there, refused by name where damaged, and taken up under the settings given now."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolltap.errors import CheckpointMismatch
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import Packer
from rolltap.trainer_client.model.checkpoint import Checkpoints, SavedCheckpoint, load_optimiser
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.network import load_model
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.model.weights import sweep, whole_folder
from rolltap.trainer_client.settings import load_trainer_settings

from .making import random_group, rows_of


@pytest.fixture
def checkpoints(model: Path) -> Checkpoints:
    return Checkpoints(model.parent / "out", "policy", model, every=1, count=2)


def made(model: Path, **optimiser: Any) -> Learner:
    settings = load_trainer_settings(
        key="key", policy="policy", model=model, out=model.parent / "out",
        optimiser={"lr": 1e-2, **optimiser}, compute={"device": "cpu"},
    )  # fmt: skip
    return Learner(model, settings, Ranks(0, 1, torch.device("cpu")))


def saved(checkpoints: Checkpoints, learner: Learner, *steps: int) -> SavedCheckpoint:
    for step in steps:
        checkpoints.save(step, step, learner.model, learner.weights(), learner.state())
    latest = checkpoints.latest()
    assert latest is not None
    return latest


def stepped(learner: Learner, step: int) -> Learner:
    (pack,) = Packer(4096, share=True)(rows_of([random_group("g", [1.0, 0.0, 0.5], seed=0)]))
    learner.backward(-learner.predict(collate(pack)).logprobs_M.mean())
    learner.apply(step)
    return learner


def test_a_resumed_run_has_the_optimisers_settings_that_it_is_given(model: Path, checkpoints: Checkpoints) -> None:
    first = stepped(made(model), 1)
    latest = saved(checkpoints, first, 1)
    resumed = made(model, lr=1e-9, betas=(0.5, 0.6), weight_decay=0.25)
    resumed.restore(load_optimiser(latest))
    (group,) = resumed.optimiser.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-9, (0.5, 0.6), 0.25)
    moments = [one.optimiser.state[next(one.model.parameters())]["exp_avg"] for one in (first, resumed)]
    torch.testing.assert_close(moments[1], moments[0])
    assert moments[0].any()


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.6])
@pytest.mark.parametrize("name", ["trainer.json", "optimiser.pt", "model.safetensors", "config.json"])
def test_a_damaged_checkpoint_is_named(model: Path, checkpoints: Checkpoints, name: str, share: float) -> None:
    folder = saved(checkpoints, made(model), 1).folder
    truncate(folder / name, share)
    with pytest.raises(CheckpointMismatch, match=str(folder)):
        take_up(checkpoints)


@pytest.mark.parametrize("content", [b"no such thing" * 9, b"\x80\x02}q\x00."])
def test_an_optimiser_that_is_something_else_is_named(model: Path, checkpoints: Checkpoints, content: bytes) -> None:
    folder = saved(checkpoints, made(model), 1).folder
    (folder / "optimiser.pt").write_bytes(content)
    with pytest.raises(CheckpointMismatch, match=str(folder)):
        load_optimiser(SavedCheckpoint(1, 1, folder))


def write_half(folder: Path) -> None:
    with whole_folder(folder) as making:
        (making / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt


def take_up(checkpoints: Checkpoints) -> None:
    latest = checkpoints.latest()
    assert latest is not None
    load_optimiser(latest)
    load_model(latest.folder, torch.float32)


def test_a_model_without_some_of_its_weights_is_refused(model: Path) -> None:
    """transformers draws them at random."""
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointMismatch, match=r"has no lm_head\.weight"):
        load_model(model, torch.float32)


def test_a_folder_that_was_being_written_is_no_checkpoint_and_goes_at_the_next_start(
    model: Path, checkpoints: Checkpoints
) -> None:
    latest = saved(checkpoints, made(model), 1)
    with pytest.raises(KeyboardInterrupt):
        write_half(latest.folder.with_name("step-2"))
    assert checkpoints.latest() == latest
    checkpoints.sweep()
    assert [path.name for path in latest.folder.parent.iterdir()] == ["step-1"]


def test_a_folder_that_was_being_removed_is_no_checkpoint_and_goes_at_the_next_start(
    model: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(path: Path, **_: Any) -> None:
        if path.exists():
            (path / "model.safetensors").unlink()
            raise KeyboardInterrupt

    latest = saved(checkpoints, made(model), 1, 2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", dies)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.prune(3)
    shutil.rmtree(latest.folder)
    shutil.rmtree(latest.folder.with_name("step-2"))
    assert checkpoints.latest() is None
    checkpoints.sweep()
    assert not list(latest.folder.parent.iterdir())


def test_a_folder_is_written_again_without_a_moment_in_which_half_of_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_and_remove(path: Path, **options: Any) -> None:
        seen.append(final.exists() and (final / "model").read_text())
        remove(path, **options)

    seen: list[str | bool] = []
    final, remove = tmp_path / "step-1", shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", look_and_remove)
    for content in ("first", "second"):
        with whole_folder(final) as making:
            (making / "model").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert (seen[0], seen[-1]) == (False, "second")
    assert set(seen) == {False, "first", "second"}


def test_a_folder_that_was_set_aside_but_not_replaced_comes_back(tmp_path: Path) -> None:
    """The process died between the two renames: neither the old folder nor the new one had the name."""
    final = tmp_path / "step-1"
    for content in ("first", "second"):
        with whole_folder(final) as making:
            (making / "model").write_text(content)
        if content == "first":
            final.rename(tmp_path / ".replaced-step-1")
            (tmp_path / ".making-step-1").mkdir()
            sweep(tmp_path)
            assert (final / "model").read_text() == "first"
            assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert (final / "model").read_text() == "second"


def test_other_names_beside_the_checkpoints_are_left_alone(model: Path, checkpoints: Checkpoints) -> None:
    latest = saved(checkpoints, made(model), 1)
    (latest.folder.parent / "step-1-mine").mkdir()
    checkpoints.sweep()
    checkpoints.prune(1)
    assert checkpoints.latest() == latest
    assert (latest.folder.parent / "step-1-mine").exists()
