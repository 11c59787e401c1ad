"""The `docker` runtime: one container per run, with the docker client or a compatible one."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.base import Command, Launch, Limits, RuntimeOptions, Source
from rolltap.harnesses.runtimes.container import HOME, WORKDIR, ContainerWorkspace, require_client, require_image
from rolltap.harnesses.runtimes.folders import Folders, make_folders

PULL_S = 1800.0


class DockerWorkspace(ContainerWorkspace):
    runtime = client = "docker"
    loopback_host = "host.docker.internal"

    def __init__(self, folders: Folders, image: str, network: str) -> None:
        super().__init__(folders, image)
        self.network = network

    def command_line(self, launch: Command, env: dict[str, str], limits: Limits) -> list[str]:
        argv = ["docker", "run", "--rm", "--init", "--name", self.container, "--pull", "never"]
        argv += ["--network", self.network]
        if self.network != "none":
            argv += ["--add-host", f"{self.loopback_host}:host-gateway"]
        argv += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", f"{os.getuid()}:{os.getgid()}"]
        argv += ["--pids-limit", str(limits.processes), "--ulimit", f"nofile={limits.open_files}"]
        argv += ["--memory", f"{limits.memory_mb}m"]
        argv += ["--ulimit", f"fsize={limits.file_mb << 20}", "--ulimit", "core=0"]
        for binding in (f"{self.home_folder}:{HOME}", *self.bindings(launch)):
            argv += ["--volume", binding]
        argv += ["--env", f"HOME={HOME}"]
        for name in self.client_environment(env):
            argv += ["--env", name]  # the client takes the value from its environment, hidden from other users
        if launch.stdin or self.pipes:
            argv.append("--interactive")
        return [*argv, "--workdir", str(WORKDIR), "--entrypoint", "", self.image, *launch.argv]

    def client_environment(self, env: dict[str, str]) -> dict[str, str]:
        """All of `env` except HOME, which is set in argv, and PATH, which is the image's: the client has its own."""
        return {name: value for name, value in env.items() if name not in ("PATH", "HOME")}

    def another(self, folders: Folders) -> DockerWorkspace:
        return DockerWorkspace(folders, self.image, "none")

    async def remove_container(self) -> None:
        await _docker("rm", "--force", self.container)


@dataclass(frozen=True, slots=True)
class DockerRuntime:
    """`network` is a docker network. An internal one that contains the proxy blocks all other access."""

    image: str
    base: Path | None = None
    network: str = "bridge"
    name: str = "docker"
    launches: ClassVar[type[Launch]] = Command

    @classmethod
    def create(cls, options: RuntimeOptions) -> Self:
        return cls(options.image, options.base)

    def __post_init__(self) -> None:
        require_image("docker", self.image)

    async def prepare(self, source: Source) -> DockerWorkspace:
        require_client("docker")
        if (await _docker("image", "inspect", self.image))[0]:
            code, output = await _docker("pull", "--quiet", self.image)
            if code:
                raise RuntimeFailed(f"docker can't pull {self.image}: {output.strip()[-300:]}")
        return DockerWorkspace(await make_folders(self.base, source), self.image, self.network)


async def _docker(*arguments: str) -> tuple[int, str]:
    """Runs a docker command. Returns its exit code and output. Raises `RuntimeFailed` after `PULL_S`."""
    process = await asyncio.create_subprocess_exec(
        "docker",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(PULL_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise RuntimeFailed(f"docker {arguments[0]} ran past {PULL_S:g} s") from None
    return process.returncode or 0, output.decode(errors="replace")
