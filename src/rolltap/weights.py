"""Pushes the weights of any trainer to a policy's engines, through folders that the engines see or over the network.

    push(client, "coder", model, version=7, through=Path("/shared/weights"))      # safetensors, Hugging Face's names
    push(client, "coder", model, version=8, through=WeightSender(...))            # over a process group

The client sends the trainer's name and incarnation, so the pushes of a replaced trainer are refused.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltap.contract.trainer import PauseMode
from rolltap.errors import ConfigError
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.push import WeightSender, push_folder
from rolltap.trainer_client.model import weights as folders

KEPT = 2
"""Folders that stay in `through`: the one that is served, and the one before, which engines may still be reading."""


def push(
    client: TrainerClient,
    policy: str,
    weights: Any,
    version: int,
    *,
    through: Path | WeightSender,
    mode: PauseMode = "keep",
) -> None:
    """The policy's engines take over `weights` as `version`.

    `weights` is a transformers model, a peft model (its adapter alone is pushed), a mapping of tensors by the names of
    Hugging Face's folders, or such a folder. With a folder as `through`, it gets `version-N`, whole or not at all, and
    `KEPT` stay. If the engines can't load them, the old version serves on and the error says why.
    """
    whole = isinstance(weights, Path)
    if whole and not weights.is_dir():
        raise ConfigError(f"{weights} is not a folder on this machine: weights are pushed from a folder")
    adapter = (weights / "adapter_config.json").exists() if whole else hasattr(weights, "peft_config")
    if isinstance(through, WeightSender):
        if adapter or whole:
            raise ConfigError("a sender sends tensors: an adapter or a folder is pushed through a folder")
        through.push(client, policy, _tensors(weights), version, mode)
        return
    folder = weights if whole else _written(weights, through / f"version-{version}")
    push_folder(client, policy, folder, version, mode, adapter=adapter)
    if not whole:
        prune(through)


def _written(weights: Any, final: Path) -> Path:
    with folders.whole_folder(final) as making:
        if isinstance(weights, Mapping):
            from huggingface_hub import save_torch_state_dict

            save_torch_state_dict(dict(weights), making)
        else:
            weights.save_pretrained(making)
    return final


def _tensors(weights: Any) -> Mapping[str, Any]:
    if isinstance(weights, Mapping):
        return weights
    state = {name: tensor.detach().cpu() for name, tensor in weights.state_dict().items()}
    return folders.sendable(weights, state)


def prune(through: Path) -> None:
    """Removes the pushed folders in `through` but the newest `KEPT`."""
    versions = sorted(through.glob("version-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in versions[:-KEPT]:
        shutil.rmtree(path)
