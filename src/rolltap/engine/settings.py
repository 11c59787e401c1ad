"""The embedded engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one engine process runs.

    `model` is a Hugging Face folder (`config.json`, `*.safetensors`), `name` what requests call it (the folder's name
    if empty), `port` 0 any free one, `slots` how many requests are sampled together, `threads` torch's, and `context`
    the longest sequence (the model's own limit if 0).
    """

    model: Path
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8100
    slots: int = 32
    threads: int = 1
    context: int = 0

    @property
    def served_name(self) -> str:
        return self.name or self.model.resolve().name
