"""The embedded engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rolltap.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
        """`ConfigError` if torch can't compute there."""
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device != "auto":
            name = self.device
        try:
            torch.empty(1, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConfigError(f"--device {name}: {str(error).splitlines()[0]}") from error
        return name

    @property
    def torch_dtype(self) -> torch.dtype:
        automatic = "bfloat16" if self.torch_device.startswith("cuda") else "float32"
        name = automatic if self.dtype == "auto" else self.dtype
        if name not in DTYPES:
            raise ConfigError(f"--dtype {name}: {' or '.join(DTYPES)}, or auto")
        return DTYPES[name]
