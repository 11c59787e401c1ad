"""The embedded engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelServerSettings:
    """How one engine process runs.

    `model` is a Hugging Face folder (`config.json`, `*.safetensors`). `name` is the name that requests use (empty: the
    folder's name). `port` 0 takes any free port. `slots` is how many requests are sampled together, `threads` the
    number of torch threads, `context` the longest sequence in tokens (0: the model's own limit), `key` what clients
    must send.
    """

    model: Path
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8100
    slots: int = 32
    threads: int = 1
    context: int = 0
    key: str = ""

    @property
    def served_name(self) -> str:
        return self.name or self.model.resolve().name
