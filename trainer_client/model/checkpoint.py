"""Checkpoints: `<out>/checkpoints/step-N` with the model, the optimiser's state, and the step, version and policy.

A step without a checkpoint writes only the weights that it pushes, `<out>/weights/step-N`. An older folder is removed
once the engines serve a newer one.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rolltap.errors import CheckpointMismatch
from rolltap.trainer_client.model.lora import save_adapters
from rolltap.trainer_client.model.weights import remove_folder, save_model, sweep, whole_folder
from rolltap.trainer_client.settings import LoraSettings

ABOUT = "trainer.json"
"""File in a checkpoint with its step, weight version and policy."""

STEP = re.compile(r"step-(\d+)")
"""The name of a step's folder."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint on disk, of the weights that are served as `version`."""

    step: int
    version: int
    folder: Path


class Checkpoints:
    """The checkpoints of one run that trains `policy` from the model folder `source`; it keeps the newest `count`."""

    def __init__(self, out: Path, policy: str, source: Path, *, every: int, count: int) -> None:
        self._checkpoints = out / "checkpoints"
        self._weights = out / "weights"
        self._policy = policy
        self._source = source
        self._every = every
        self._count = count

    def sweep(self) -> None:
        """Removes the folders that a killed run was writing or removing."""
        for parent in (self._checkpoints, self._weights):
            sweep(parent)

    def latest(self) -> SavedCheckpoint | None:
        """The newest checkpoint; None without one. `CheckpointMismatch` if it is damaged or of another policy."""
        steps = _steps(self._checkpoints)
        if not steps:
            return None
        folder = self._checkpoints / f"step-{steps[-1]}"
        try:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            policy, version = about["policy"], int(about["version"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, ABOUT, error) from error
        if policy != self._policy:
            raise CheckpointMismatch(f"{folder} is of policy {policy!r}, not {self._policy!r}; give another --out")
        return SavedCheckpoint(steps[-1], version, folder)

    def due(self, step: int, last: bool) -> bool:
        return last or step % self._every == 0

    def save(
        self, step: int, version: int, model: Any, state: dict[str, Any] | None, optimiser: dict[str, Any]
    ) -> Path:
        """Writes the checkpoint of `step`, durable when this returns. Engines can load the folder."""
        final = self._checkpoints / f"step-{step}"
        with whole_folder(final) as making:
            save_model(model, state, making, self._source)
            torch.save(optimiser, making / "optimiser.pt")
            (making / ABOUT).write_text(self._about(step, version), encoding="utf-8")
        return final

    def renumber(self, saved: SavedCheckpoint, version: int) -> None:
        """Gives the checkpoint's weights another version number."""
        making = saved.folder / f".making-{ABOUT}"
        with making.open("w", encoding="utf-8") as file:
            file.write(self._about(saved.step, version))
            file.flush()
            os.fsync(file.fileno())
        making.rename(saved.folder / ABOUT)

    def save_weights(self, step: int, model: Any, state: dict[str, Any] | None) -> Path:
        """Writes only the files that engines load."""
        final = self._weights / f"step-{step}"
        with whole_folder(final) as making:
            save_model(model, state, making, self._source)
        return final

    def save_adapters(self, step: int, adapters: dict[str, Any], settings: LoraSettings) -> Path:
        """Writes only the adapters, as peft's folder."""
        final = self._weights / f"step-{step}"
        with whole_folder(final) as making:
            save_adapters(adapters, settings, self._source, making)
        return final

    def _about(self, step: int, version: int) -> str:
        return json.dumps({"step": step, "version": version, "policy": self._policy})

    def prune(self, served: int) -> None:
        """Removes old folders: call it once the engines serve step `served`, whose folders stay."""
        for step in _steps(self._checkpoints)[: -self._count]:
            if step != served:
                remove_folder(self._checkpoints / f"step-{step}")
        for step in _steps(self._weights):
            if step != served:
                remove_folder(self._weights / f"step-{step}")


def load_optimiser(saved: SavedCheckpoint) -> dict[str, Any]:
    """The optimiser's state of a checkpoint. `CheckpointMismatch` if it can't be read."""
    try:
        state = torch.load(saved.folder / "optimiser.pt", weights_only=True, map_location="cpu")
    except (OSError, EOFError, LookupError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise _damaged(saved.folder, "optimiser.pt", error) from error
    if not isinstance(state, dict) or "param_groups" not in state:
        raise _damaged(saved.folder, "optimiser.pt", "it holds no optimiser's state")
    return state


def _damaged(folder: Path, name: str, reason: object) -> CheckpointMismatch:
    summary = str(reason).splitlines()[0] if str(reason) else repr(reason)
    return CheckpointMismatch(
        f"{folder} is not a whole checkpoint of this trainer: {name} can't be read ({summary}). Move the folder away "
        "to go on from the one before it, or from the model if there is none"
    )


def _steps(folder: Path) -> list[int]:
    """The steps with a folder in `folder`, in ascending order."""
    names = [STEP.fullmatch(path.name) for path in folder.glob("step-*")]
    return sorted(int(name[1]) for name in names if name)
