"""Writes verl's weights to a folder: a checkpoint engine named `rolltap`, which verl's workers import and call."""

# pyright: reportMissingImports=false
# Only users of this adapter have the package.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from rolltap.trainer_client.model.weights import whole_folder


@CheckpointEngineRegistry.register("rolltap")
class FolderCheckpointEngine(CheckpointEngine):
    """All ranks gather the weights. The master writes them in Hugging Face's format to `version-N` in `folder`."""

    def __init__(self, is_master: bool, bucket_size: int, folder: str) -> None:
        self._is_master, self._folder = is_master, Path(folder)

    async def send_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """`global_steps` is the version."""
        tensors = {}
        for name, tensor in weights:
            if self._is_master:
                tensors[name] = tensor.detach().cpu().contiguous()
        if self._is_master:
            with whole_folder(self._folder / f"version-{global_steps}") as folder:
                save_torch_state_dict(tensors, folder)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("nothing receives")

    def init_process_group(self, **_: Any) -> None: ...

    def finalize(self) -> None: ...

    async def receive_weights(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("nothing receives")
