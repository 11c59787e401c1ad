"""Other people's trainers, fed by leases: a trainer, a file, all on the public client.

Importing an adapter's module imports its trainer. Each keeps the contract of docs/bring-your-own-trainer.md: it
acknowledges before the optimiser's step, pushes after it, and rewinds when it is started again.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rolltap.errors import ConfigError
from rolltap.extras import install_line


class UntestedTrainer(UserWarning):
    """The installed version of a trainer is not one that its adapter was tested with."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Where an adapter is and what it was tested with: versions of `package`, which the extra `extra` installs."""

    trainer: str
    module: str
    package: str
    tested: tuple[str, ...]
    extra: str

    def check_installed(self) -> None:
        """`ConfigError` without the package; `UntestedTrainer` is warned of where another version is installed."""
        try:
            installed = version(self.package)
        except PackageNotFoundError:
            raise ConfigError(f"{self.trainer} is not installed: {install_line(self.extra)}") from None
        if installed not in self.tested:
            tested = ", ".join(self.tested)
            message = f"{self.package} {installed} was not tested with rolltap; tested: {tested}"
            warnings.warn(message, UntestedTrainer, stacklevel=3)


_HERE = "rolltap.trainer_client.adapters"

ADAPTERS: Mapping[str, Adapter] = {
    "trl-grpo": Adapter("TRL GRPOTrainer", f"{_HERE}.trl_grpo", "trl", ("1.16.0",), "trl"),
    "trl-async": Adapter("TRL AsyncGRPOTrainer", f"{_HERE}.trl_async", "trl", ("1.16.0",), "trl"),
    "tinker": Adapter("Tinker", f"{_HERE}.tinker_service", "tinker", ("0.38.0",), "tinker"),
    "verl": Adapter("verl", f"{_HERE}.verl_trainer", "verl", ("0.9.1",), "verl"),
    "openenv": Adapter("OpenEnv sessions", f"{_HERE}.openenv_sessions", "openenv", ("0.10.0",), "openenv"),
    "art": Adapter("ART", f"{_HERE}.art_groups", "openpipe-art", ("0.5.23",), "art"),
    "skyrl": Adapter("SkyRL", f"{_HERE}.skyrl_generator", "skyrl", ("0.4.0",), "skyrl"),
}
"""Every adapter by its name. The contract suite (tests/trainers) passes over all of them."""
