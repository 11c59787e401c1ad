"""The shared part of docker and apptainer: a workspace whose runs are command lines of a container engine's client.

The working copy and HOME are folders of this machine, mounted in the container. The harness must be in the image.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from abc import abstractmethod
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Command, Endpoint, Exit, Launch, Limits
from rolltap.harnesses.runtimes.code_sandbox import Pipes
from rolltap.harnesses.runtimes.folders import Folders, FolderWorkspace
from rolltap.harnesses.runtimes.process import clean_environment
from rolltap.harnesses.runtimes.tree import MARK, Share, TreeCommand, run_tree

WORKDIR = Path("/workspace")
HOME = Path("/home/agent")
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CLIENT_VARIABLES = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "XDG_RUNTIME_DIR")
"""Variables of the runner that the engine's client needs; the container does not get them."""

ENGINE_FAILURES = frozenset({125, 255})
"""Exit codes of docker (125) and apptainer (255) if the container itself could not be run."""

OWN_CODES = "case $code in 125|255) code=1;; esac"
RUN = f'"$@"; code=$?; {OWN_CODES}; exit $code'
"""The first command in a container: those codes are the engine's alone, whatever the agent's command returns."""


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
            env={**client_env, **self.client_environment(inside), MARK: self.container},
            cwd=self._folders.root,
            stdin=launch.stdin,
            pipes=self.pipes,
        )
        share = Share(limits, (self.folder, self.home_folder))
        started = time.monotonic()
        try:
            code, ending, excess = await run_tree(command, share, out=self._folders.out, timeout=timeout)
        finally:
            await self.remove_container()
        output = self._folders.output()
        if code in ENGINE_FAILURES:
            raise RuntimeFailed(f"{self.client} could not run {self.image}: {output.strip()[-300:]}")
        return Exit(ending or launch.ending(code), time.monotonic() - started, code, output, excess)


def require_client(client: str) -> None:
    if shutil.which(client) is None:
        raise RuntimeFailed(f"{client} is not installed; install it, or use the runtime 'bubblewrap'")
