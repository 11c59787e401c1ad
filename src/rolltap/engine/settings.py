"""The embedded engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class ModelServerSettings:
    """How one engine process runs.

    `model` is a Hugging Face folder (`config.json`, `*.safetensors`). `name` is the name that requests use (empty: the
    folder's name). `port` 0 takes any free port. `slots` is how many requests are sampled together, `threads` the
    number of torch threads, `context` the longest sequence in tokens (0: the model's own limit), `key` what clients
    must send. `device` is torch's ("auto": a CUDA card where there is one, else the CPU; "mps" on a Mac), `dtype` is
    "float32", "bfloat16" or "auto" (bfloat16 on a card).
    """

    model: Path
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8100
    slots: int = 32
    threads: int = 1
    context: int = 0
    key: str = ""
    device: str = "auto"
    dtype: str = "auto"

    @property
    def served_name(self) -> str:
        return self.name or self.model.resolve().name

    @property
    def torch_device(self) -> str:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def torch_dtype(self) -> torch.dtype:
        if self.dtype == "auto":
            return torch.bfloat16 if self.torch_device.startswith("cuda") else torch.float32
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]
