"""A sandbox for Harbor's tasks, over our `bubblewrap` runtime: no Docker, no root, no images.

`harbor run --env rolltap.harnesses.harbor.environment:BubblewrapEnvironment --ek harness=codex`

The task's folders (`/app`, `/logs`, `/tests`, `/solution`, `/tmp` and what its Dockerfile names) are folders of this
machine that every command sees at the same paths; the system is this machine's, read-only. Each command is a sandbox of
its own with the limits of our runtime, and no process outlives it. Whatever the task's network policy says, there is no
network; while `reaching` is open, the model can be reached.

Before the tests come, all that steers tools is taken from the agent: `/tests`, `/logs/verifier`, HOME and `/tmp` are
empty again, and its key and its way to the model are gone.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import EnvironmentConfig

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import OWN_CONFIGURATION, Command, Ending, Endpoint, Exit, Limits
from rolltap.harnesses.harbor.dockerfile import CopyStep, EnvironmentRecipe, RunStep, read_recipe
from rolltap.harnesses.harbor.names import installation_of
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime, BubblewrapWorkspace
from rolltap.harnesses.runtimes.folders import empty_folder
from rolltap.harnesses.sources import Empty

SANDBOX = "bubblewrap"
FOLDERS = ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution", "installed-agent", "tmp")
SYSTEM = {"usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "run", "home"}
TESTS, VERIFIER_LOGS, TRANSFER = "/tests", "logs/verifier", "/.transfer"
ONE_USER = ("", "root", "0", "agent", str(bubblewrap.AGENT_ID))
LONGEST_S = 7 * 24 * 3600.0
"""For a command without a limit of its own: Harbor's phases have theirs."""

Location = str | PurePosixPath


def recipe_of(folder: Path, config: EnvironmentConfig) -> EnvironmentRecipe:
    """How the environment in `folder` is made here; `TaskInvalid` says why it can't be."""
    if image := config.docker_image:
        raise TaskInvalid(f"the task needs the image {image!r}, and the sandbox has this machine's system: use Docker")
    recipe = read_recipe(folder)
    if config.workdir:
        recipe.workdir = PurePosixPath(config.workdir)
    check_lasting(recipe.workdir)
    return recipe


def check_lasting(path: PurePosixPath) -> None:
    """`TaskInvalid` for a folder that can't be one of the task's."""
    if not path.is_absolute() or ".." in path.parts:
        raise TaskInvalid(f"{path} is no absolute path of the sandbox")
    if path.parts[1:2] and path.parts[1] in SYSTEM and not path.is_relative_to(bubblewrap.HOME):
        raise TaskInvalid(f"{path} is this machine's in the sandbox: nothing can be put there")


class BubblewrapEnvironment(BaseEnvironment):
    """`harness` is the agent whose tested release is put on PATH; `base` is the folder of the sandboxes' folders."""

    def __init__(self, *args: Any, harness: str = "", base: str | None = None, **kwargs: Any) -> None:
        self._runtime = self.runtime_for(harness, Path(base) if base else None)
        self._workspace: BubblewrapWorkspace | None = None
        self._recipe = EnvironmentRecipe()
        self._reach = ""
        self._used = False
        self._verifying = False
        self._one_at_a_time = asyncio.Lock()
        super().__init__(*args, **kwargs)

    @staticmethod
    def runtime_for(harness: str, base: Path | None = None) -> BubblewrapRuntime:
        """`RuntimeFailed` names what this machine lacks: bubblewrap, or the release of the harness."""
        if refusal := bubblewrap.refusal():
            raise RuntimeFailed(
                f"no sandbox can be made here ({refusal}): apt install bubblewrap and allow user namespaces, "
                "or use another environment of Harbor's (--runtime docker)"
            )
        installation = installation_of(harness)
        bins, needs = (installation.bins, installation.needs) if installation else ((), ())
        return BubblewrapRuntime(base, bins, needs)

    @staticmethod
    def type() -> str:
        return SANDBOX

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True, dynamic_network_policy=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(memory_limit=True)

    def _validate_definition(self) -> None:
        self._recipe = recipe_of(self.environment_dir, self.task_env_config)

    async def _apply_network_policy(self, network_policy: Any) -> None:
        """No policy is stricter than what holds already."""

    async def start(self, force_build: bool) -> None:
        self._workspace = await self._runtime.prepare(Empty())
        for name in FOLDERS:
            (self._root / name).mkdir(parents=True, exist_ok=True)
        self._show(self._recipe.workdir)
        for step in self._recipe.steps:
            if isinstance(step, CopyStep):
                await self._put(step)
            else:
                await self._build(step)
        await self._run(f"mkdir -p -- {quote(str(self._recipe.workdir))}", PurePosixPath("/"), {}, LONGEST_S)
        self._used = False

    async def _build(self, step: RunStep) -> None:
        where = quote(str(step.workdir))
        result = await self.exec(f"mkdir -p -- {where} && cd {where} && {step.command}", cwd="/")
        if result.return_code:
            lines = (result.stdout or "").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {result.return_code}"
            raise SandboxBuildFailedError(f"RUN {step.command[:200]} fails without Docker: {reason}")

    async def stop(self, delete: bool) -> None:
        """The folders go in any case: what is to stay, Harbor has downloaded."""
        if self._workspace is not None:
            await self._workspace.close()

    @contextmanager
    def reaching(self, endpoint: Endpoint) -> Iterator[None]:
        """Within it commands can reach `endpoint`, at the address of `inside`."""
        self._reach = endpoint.base_url
        try:
            yield
        finally:
            self._reach = ""

    def inside(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` as the agent is told it."""
        return self._prepared.endpoint(endpoint)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        name = self._resolve_user(user)
        if name is not None and str(name) not in ONE_USER:
            raise TaskInvalid(f"the sandbox has one user, and the task asks for {name!r}: use Docker")
        self._used = True
        own = OWN_CONFIGURATION if self._verifying else {}
        variables = {**self._recipe.env, **own, **(self._merge_env(env) or {})}
        where = PurePosixPath(cwd or self._recipe.workdir)
        exit_ = await self._run(command, where, variables, float(timeout_sec or LONGEST_S))
        if exit_.ending is Ending.TIMED_OUT:
            raise RuntimeError(f"the command ran past {timeout_sec} s")
        return ExecResult(stdout=exit_.output, return_code=137 if exit_.code is None else exit_.code)

    async def _run(
        self, command: str, where: PurePosixPath, env: Mapping[str, str], timeout: float, transfer: Path | None = None
    ) -> Exit:
        self._show(where)
        mounts = {f"/{entry.name}": entry for entry in self._root.iterdir()}
        if transfer is not None:
            mounts[TRANSFER] = transfer
        shell = ("/bin/bash", "-c", 'cd -- "$1" && exec /bin/bash -c "$2"', "bash", str(where), command)
        launch = Command(shell, env, mounts=mounts)
        async with self._one_at_a_time:
            return await self._prepared.run(launch, self._limits, timeout, reach=self._reach)

    async def upload_file(self, source_path: Path | str, target_path: Location) -> None:
        target = PurePosixPath(target_path)
        await self._put(CopyStep(Path(source_path), target.parent, target.name))

    async def upload_dir(self, source_dir: Path | str, target_dir: Location) -> None:
        if str(target_dir) == TESTS and self._used:
            await self._take_from_agent()
        await self._put(CopyStep(Path(source_dir), PurePosixPath(target_dir)))

    async def download_file(self, source_path: Location, target_path: Path | str) -> None:
        with tempfile.TemporaryDirectory(dir=self._state) as folder:
            await self._copy_inside(f"cp -- {quote(str(source_path))} {TRANSFER}/it", folder)
            await asyncio.to_thread(_copy_regular, Path(folder, "it"), Path(target_path))

    async def download_dir(self, source_dir: Location, target_dir: Path | str) -> None:
        """Regular files and folders only: what the agent left may be links that lead anywhere."""
        with tempfile.TemporaryDirectory(dir=self._state) as folder:
            await self._copy_inside(f"cp -a -- {quote(f'{source_dir}/.')} {TRANSFER}/", folder)
            await asyncio.to_thread(shutil.copytree, folder, target_dir, ignore=_irregular, dirs_exist_ok=True)

    async def _put(self, step: CopyStep) -> None:
        check_lasting(step.folder)
        self._show(step.folder)
        there, target = quote(str(step.folder)), quote(str(step.folder / step.name))
        with tempfile.TemporaryDirectory(dir=self._state) as folder:
            name = await asyncio.to_thread(_staged, step.source, Path(folder, "it"))
            await self._copy_inside(f"mkdir -p -- {there} && cp -a -- {TRANSFER}/{name} {target}", folder)

    async def _copy_inside(self, command: str, folder: str) -> None:
        exit_ = await self._run(command, PurePosixPath("/"), {}, LONGEST_S, Path(folder))
        if exit_.code:
            raise RuntimeFailed(f"can't copy into or out of the sandbox: {exit_.output.strip()[-300:]}")

    async def _take_from_agent(self) -> None:
        self._used, self._verifying = False, True
        await self._prepared.clear_home()
        for name in ("tests", "tmp", VERIFIER_LOGS):
            await asyncio.to_thread(empty_folder, self._root / name)

    def _show(self, path: PurePosixPath) -> None:
        """Makes the first folder of a path of the task's one that lasts from command to command."""
        first = "".join(path.parts[1:2])
        if first and first not in SYSTEM | {".."}:
            (self._root / first).mkdir(exist_ok=True)

    @property
    def _prepared(self) -> BubblewrapWorkspace:
        if self._workspace is None:
            raise RuntimeFailed("the environment has not been started")
        return self._workspace

    @property
    def _state(self) -> Path:
        """The folder of everything, which no command sees."""
        return self._prepared.folder.parent

    @property
    def _root(self) -> Path:
        return self._state / "root"

    @property
    def _limits(self) -> Limits:
        config, limits = self.task_env_config, Limits()
        memory, disk = config.memory_mb or limits.memory_mb, config.storage_mb or limits.disk_mb
        return Limits(memory_mb=memory, disk_mb=disk)


def _staged(source: Path, copy: Path) -> str:
    """Copies `source`, so that nothing in a sandbox can change it; what `cp` is to be given of the copy's folder."""
    if source.is_dir():
        shutil.copytree(source, copy)
        return f"{copy.name}/."
    shutil.copy2(source, copy)
    return copy.name


def _copy_regular(source: Path, target: Path) -> None:
    if not stat.S_ISREG(source.lstat().st_mode):
        raise RuntimeFailed(f"{target.name} is no regular file in the sandbox")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _irregular(folder: str, names: list[str]) -> set[str]:
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return {name for name, mode in modes.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))}
