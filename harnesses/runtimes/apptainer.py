"""The `apptainer` runtime: containers without a daemon or root, as clusters run them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from rolltap.errors import TaskInvalid
from rolltap.harnesses.base import Command, Launch, Limits, RuntimeOptions, Source
from rolltap.harnesses.runtimes.container import HOME, WORKDIR, ContainerWorkspace, require_client, require_image
from rolltap.harnesses.runtimes.folders import Folders, make_folders
from rolltap.harnesses.runtimes.process import limited

SCHEMES = ("docker", "oras", "library", "shub", "docker-archive", "oci")


class ApptainerWorkspace(ContainerWorkspace):
    runtime = client = "apptainer"
    loopback_host = "127.0.0.1"
    """The container uses the machine's network: apptainer isolates it only for root."""

    def command_line(self, launch: Command, env: dict[str, str], limits: Limits) -> list[str]:
        argv = ["apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--writable-tmpfs", "--no-eval"]
        argv += ["--home", f"{self.home_folder}:{HOME}"]
        for binding in self.bindings(launch):
            argv += ["--bind", binding]
        return [*argv, "--pwd", str(WORKDIR), self.image, *limited(launch.argv, limits)]

    def client_environment(self, env: dict[str, str]) -> dict[str, str]:
        """apptainer sets `APPTAINERENV_X` as `X` in the container."""
        return {f"APPTAINERENV_{name}": value for name, value in env.items() if name != "HOME"}

    def another(self, folders: Folders) -> ApptainerWorkspace:
        return ApptainerWorkspace(folders, self.image)

    async def remove_container(self) -> None:
        """Does nothing: the container's processes have the run's mark and are killed with the client."""


@dataclass(frozen=True, slots=True)
class ApptainerRuntime:
    """`image` is a `.sif` file, a sandbox folder, or a `docker://` address."""

    image: str
    base: Path | None = None
    name: str = "apptainer"
    launches: ClassVar[type[Launch]] = Command

    @classmethod
    def create(cls, options: RuntimeOptions) -> Self:
        return cls(options.image, options.base)

    def __post_init__(self) -> None:
        require_image("apptainer", self.image)
        scheme, separator, _ = self.image.partition("://")
        if separator and scheme not in SCHEMES:
            raise TaskInvalid(f"apptainer knows no {scheme}:// images; known: {', '.join(SCHEMES)}", param="image")
        if not separator and not Path(self.image).exists():
            raise TaskInvalid(f"no image file {self.image}; name a .sif file or docker://IMAGE", param="image")

    async def prepare(self, source: Source) -> ApptainerWorkspace:
        require_client("apptainer")
        return ApptainerWorkspace(await make_folders(self.base, source), self.image)
