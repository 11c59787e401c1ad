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
            found = version(self.package)
        except PackageNotFoundError:
            raise ConfigError(f"{self.trainer} is not installed: pip install 'rolltap[{self.extra}]'") from None
        if found not in self.tested:
            tested = ", ".join(self.tested)
            message = f"{self.package} {found} was not tested with rolltap; tested: {tested}"
            warnings.warn(message, UntestedTrainer, stacklevel=3)


_HERE = "rolltap.trainer_client.adapters"

ADAPTERS: Mapping[str, Adapter] = {
    "trl-grpo": Adapter("TRL GRPOTrainer", f"{_HERE}.trl_grpo", "trl", ("1.16.0",), "trl"),
    "trl-async": Adapter("TRL AsyncGRPOTrainer", f"{_HERE}.trl_async", "trl", ("1.16.0",), "trl"),
    "tinker": Adapter("Tinker", f"{_HERE}.tinker_service", "tinker", ("0.38.0",), "tinker"),
}
"""Every adapter by its name. The contract suite (tests/trainers) passes over all of them."""
