"""Adapters that feed leased groups to third-party trainers: one file per trainer, all on the public client.

Importing an adapter's module imports its trainer. Each follows the contract of docs/bring-your-own-trainer.md: it
acknowledges before the optimiser's step, pushes after it, and rewinds at a restart.
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
    """An adapter's module, and the tested versions of its trainer's `package`, which the extra `extra` installs.

    A trainer that is on no package index has a `repository` on GitHub and the tested `commit`.
    """

    trainer: str
    module: str
    package: str
    tested: tuple[str, ...]
    extra: str = ""
    repository: str = ""
    commit: str = ""

    @property
    def tested_with(self) -> str:
        """The package, the tested versions, and the commit if there is one."""
        return f"{self.package} {', '.join(self.tested)}" + f" at {self.commit[:7]}" * bool(self.commit)

    @property
    def how_to_install(self) -> str:
        """The command that installs the trainer."""
        if self.extra:
            return install_line(self.extra)
        return f"pip install '{self.package} @ git+https://github.com/{self.repository}@{self.commit}'"

    def check_installed(self) -> None:
        """Raises `ConfigError` without the package. Warns of `UntestedTrainer` if another version is installed."""
        try:
            installed = version(self.package)
        except PackageNotFoundError:
            raise ConfigError(f"{self.trainer} is not installed: {self.how_to_install}") from None
        if installed not in self.tested:
            message = f"{self.package} {installed} was not tested with rolltap; tested: {self.tested_with}"
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
    "slime": Adapter(
        "slime",
        f"{_HERE}.slime_rollout",
        "slime",
        ("0.3.1",),
        repository="THUDM/slime",
        commit="624b824a898ab0ec1fcb4d373004c7f3852bf515",
    ),
    "nemo-rl": Adapter(
        "NeMo RL",
        f"{_HERE}.nemo_rl_policy",
        "nemo-rl",
        ("0.6.0",),
        repository="NVIDIA-NeMo/RL",
        commit="7ea279abfbeb698b092856d0dab61e7cf39bc909",
    ),
    "prime-rl": Adapter(
        "prime-rl",
        f"{_HERE}.prime_rl_files",
        "prime-rl",
        ("0.8.0",),
        repository="PrimeIntellect-ai/prime-rl",
        commit="559b44772e471d1538537b8805cc77f3824a5e64",
    ),
}
"""Every adapter by its name. The contract suite (tests/trainers) tests all of them."""
