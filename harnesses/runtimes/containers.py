"""The `docker` and `apptainer` runtimes: workspaces whose runs are command lines of a container engine's client.

The working copy and HOME are folders of this machine, mounted in the container. The harness must be in the image.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import time
from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import urlsplit, urlunsplit

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Command, Endpoint, Exit, Launch, Limits, RuntimeOptions, Source
from rolltap.harnesses.left_files import remove
from rolltap.harnesses.runtimes.code_sandbox import Pipes
from rolltap.harnesses.runtimes.folders import Folders, FolderWorkspace, make_folders
from rolltap.harnesses.runtimes.left_runs import end_left_processes, is_left, runner_identity
from rolltap.harnesses.runtimes.process import (
    MARK,
    Share,
    TreeCommand,
    clean_environment,
    limited,
    new_mark,
    run_tree,
)
from rolltap.harnesses.threads import in_thread

WORKDIR = Path("/workspace")
HOME = Path("/home/agent")
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLIENT_VARIABLES = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "XDG_RUNTIME_DIR")
"""Variables of the runner that the engine's client needs; the container does not get them."""

ENGINE_FAILURES = frozenset({125, 255})
"""Exit codes of docker (125) and apptainer (255) if the container itself could not be run."""

OWN_CODES = "case $code in 125|255) code=1;; esac"
BEGAN = ".rolltap-began"
RUN = f'{{ true > /tmp/{BEGAN}; }} 2>/dev/null; "$@"; code=$?; {OWN_CODES}; exit $code'
"""The first command in a container: those codes are the engine's alone, whatever the agent's command returns. An agent
that traces this shell can end it with any code; what it can't take back is that a file was made in the folder."""


def require_image(name: str, image: str) -> None:
    if not image:
        raise TaskInvalid(f"the runtime {name!r} needs an image; add `image` to the task", param="image")
    if image.startswith("-"):
        raise TaskInvalid(f"{image!r} is not an image", param="image")


class ContainerWorkspace(FolderWorkspace):
    """One subclass per engine builds the command line and removes the container."""

    interpreter = "/usr/bin/env -S python3 -ISB"
    client: str
    loopback_host: str
    """The host name of the machine inside a container."""

    def __init__(self, folders: Folders, image: str) -> None:
        super().__init__(folders, WORKDIR, HOME)
        self.image = image
        self.pipes: Pipes | None = None  # of its commands, in place of a file
        self.container = f"rolltap-{secrets.token_hex(8)}"

    @abstractmethod
    def command_line(self, launch: Command, env: dict[str, str], limits: Limits) -> list[str]:
        """The client's argv for `launch`. Values of `env` are in the client's environment, not in argv."""

    @abstractmethod
    async def remove_container(self) -> None:
        """Ends the last command line's container if it still runs."""

    @abstractmethod
    async def has_lost_it(self) -> bool:
        """Whether the engine, asked after a run that ended as its own failures do, is away or says that the container
        runs. Nothing in a container can bring that about."""

    @abstractmethod
    def client_environment(self, env: dict[str, str]) -> dict[str, str]:
        """The client's variables that pass `env` to the container."""

    def bindings(self, launch: Command) -> list[str]:
        """What of this machine is mounted besides HOME, as both engines write it: `SOURCE:TARGET`, or with `:ro`."""
        folders = [(self.folder, WORKDIR), (self.tmp_folder, Path("/tmp"))]
        folders += [(folder, Path(inside)) for inside, folder in launch.mounts.items()]
        return [f"{folder}:{inside}" for folder, inside in folders]

    def beside(self, folders: Folders, pipes: Pipes) -> ContainerWorkspace:
        inner = self.another(folders)
        inner.pipes = pipes
        return inner

    @abstractmethod
    def another(self, folders: Folders) -> ContainerWorkspace:
        """A workspace of the same image, without a network where the engine can do that."""

    @property
    def tmp_folder(self) -> Path:
        return self._folders.tmp

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        """Replaces loopback, which is the container's own, by the engine's host name for the machine."""
        parts = urlsplit(endpoint.base_url)
        if parts.hostname not in ("127.0.0.1", "localhost", "::1"):
            return endpoint
        port = f":{parts.port}" if parts.port else ""
        url = urlunsplit((parts.scheme, f"{self.loopback_host}{port}", parts.path, "", ""))
        return replace(endpoint, base_url=url)

    async def run(self, launch: Launch, limits: Limits, timeout: float, *, reach: str = "") -> Exit:
        if not isinstance(launch, Command):
            raise TaskInvalid(f"the runtime {self.client!r} runs commands only; use 'thread' for a Python call")
        self._folders.write_home(launch.files)
        launch = replace(launch, argv=("/bin/sh", "-c", RUN, "sh", *launch.argv))
        inside = {**clean_environment(HOME, Path("/tmp"), IMAGE_PATH), **launch.env}
        client_env = {name: os.environ[name] for name in CLIENT_VARIABLES if name in os.environ}
        command = TreeCommand(
            self.command_line(launch, inside, limits),
            env={**client_env, **self.client_environment(inside), MARK: new_mark()},
            cwd=self._folders.root,
            stdin=launch.stdin,
            pipes=self.pipes,
        )
        share = Share(limits, (self.folder, self.home_folder))
        await in_thread(remove, self.tmp_folder / BEGAN)  # of an earlier run
        out, started, before = await self.new_output(), time.monotonic(), self._state_of_tmp()
        try:
            code, ending, excess = await run_tree(command, share, out=out, timeout=timeout)
            is_lost = code in ENGINE_FAILURES and await self.has_lost_it()
        finally:
            await self.remove_container()
        output = out.text()
        if is_lost:
            raise RuntimeFailed(f"{self.client} lost the container of {self.image}: {output.strip()[-300:]}")
        if code in ENGINE_FAILURES and self._state_of_tmp() == before:  # no command of ours began in a container
            raise RuntimeFailed(f"{self.client} could not run {self.image}: {output.strip()[-300:]}")
        return Exit(ending or launch.ending(code), time.monotonic() - started, code, output, excess)

    def _state_of_tmp(self) -> tuple[int, bool]:
        """Differs once `RUN` has begun: nobody in a container can set the time at which a folder changed."""
        return self.tmp_folder.stat().st_ctime_ns, os.path.lexists(self.tmp_folder / BEGAN)


def require_client(client: str) -> None:
    if shutil.which(client) is None:
        raise RuntimeFailed(f"{client} is not installed; install it, or use the runtime 'bubblewrap'")


PULL_S = 1800.0
LABEL = "rolltap.runner"


class DockerWorkspace(ContainerWorkspace):
    runtime = client = "docker"
    loopback_host = "host.docker.internal"

    def __init__(self, folders: Folders, image: str, network: str) -> None:
        super().__init__(folders, image)
        self.network = network

    def command_line(self, launch: Command, env: dict[str, str], limits: Limits) -> list[str]:
        argv = ["docker", "run", "--rm", "--init", "--name", self.container, "--pull", "never"]
        argv += ["--label", f"{LABEL}={runner_identity()}", "--network", self.network]
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

    async def has_lost_it(self) -> bool:
        if (await _docker("version"))[0]:
            return True
        inspect = ("container", "inspect", "--format", "{{.State.Running}}")
        return await _docker(*inspect, self.container) == (0, "true\n")


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
        await _end_left_containers()
        if (await _docker("image", "inspect", self.image))[0]:
            code, output = await _docker("pull", "--quiet", self.image)
            if code:
                raise RuntimeFailed(f"docker can't pull {self.image}: {output.strip()[-300:]}")
        return DockerWorkspace(await make_folders(self.base, source), self.image, self.network)


async def _end_left_containers() -> None:
    """Removes the containers of runners that have ended (`left_runs`)."""
    columns = f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}'
    code, listed = await _docker("ps", "--all", "--no-trunc", "--filter", f"label={LABEL}", "--format", columns)
    containers = [line.split(" ", 1) for line in listed.splitlines() if " " in line]
    left = [container for container, identity in containers if code == 0 and is_left(identity)]
    if left:
        await _docker("rm", "--force", *left)


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

    async def has_lost_it(self) -> bool:
        return False


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
        await in_thread(end_left_processes, MARK)
        return ApptainerWorkspace(await make_folders(self.base, source), self.image)
