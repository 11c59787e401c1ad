"""A Harbor environment that uses our `bubblewrap` runtime: no Docker, no root, no images.

Usage: `harbor run --env rolltap.harnesses.harbor.environment:BubblewrapEnvironment --ek harness=codex`

The task's folders (`/app`, `/logs`, `/tests`, `/solution`, `/tmp` and those that its Dockerfile names) are folders of
this machine. Every command sees them at the same paths. The system is this machine's, read-only. Each command runs in
its own sandbox with our runtime's limits, and no process outlives its command. There is no network, whatever the task's
network policy says; inside `reaching`, commands can reach the model.

Before the tests arrive, `/tests`, `/logs/verifier`, HOME and `/tmp` are emptied. From then on, commands are those of a
judge (`evaluators/programs.py`): they get `$ROLLTAP_SANDBOXED`, and tools ignore other configuration that the agent may
have written (`OWN_CONFIGURATION`). If `tests/test.sh` names the variable, the judge sees the task's folders as they
were built, with what the allow-list brings of the agent's changes. By then the session's key is invalid, and the model
can't be reached.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.task.config import EnvironmentConfig

from rolltap.errors import EvaluatorFailed, RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Command, Ending, Endpoint, Evidence, Exit, Limits, Workspace
from rolltap.harnesses.evaluators.judge_text import JudgeText
from rolltap.harnesses.evaluators.programs import NOT_USED, JudgesPlace, place_of, run_program
from rolltap.harnesses.harbor.dockerfile import BuildSteps, CopyStep, RunStep, read_build_steps
from rolltap.harnesses.harbor.names import installation_of
from rolltap.harnesses.left_files import MOST_BYTES, MOST_FILES, CopyBudget, LeftFiles, copy_out
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime, BubblewrapWorkspace
from rolltap.harnesses.runtimes.code_sandbox import VARIABLE
from rolltap.harnesses.runtimes.folders import copy_tree, empty_folder
from rolltap.harnesses.runtimes.sources import Empty
from rolltap.harnesses.threads import in_thread
from rolltap.types import UNPROTECTED, Task

SANDBOX = "bubblewrap"
FOLDERS = ("logs/agent", "logs/verifier", "logs/artifacts", "tests", "solution", "installed-agent", "tmp")
"""They, and what else is in `logs`, are no part of the working copy."""
OF_HARBOR = frozenset(folder.partition("/")[0] for folder in FOLDERS)
SYSTEM = {"usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "run", "home"}
"""The system's top-level folders. A task can put files into none of them, except into HOME."""

TESTS, SCRIPT, VERIFIER_LOGS, TRANSFER = "/tests", "test.sh", "logs/verifier", "/.transfer"
"""`TRANSFER` is mounted only in commands that copy files in or out."""

JUDGEMENT = "judgement.json"
"""In the trial's folder, which no command sees: what a reward's detail says about its judge, as JSON."""

ONE_USER = ("", "root", "0", "agent", str(bubblewrap.AGENT_ID))
"""The users that Harbor may ask for. All of them are the sandbox's only user."""

LONGEST_S = 7 * 24 * 3600.0
"""Time limit of a command without its own limit. Harbor limits its phases itself."""

Location = str | PurePosixPath


def build_steps_of(folder: Path, config: EnvironmentConfig) -> BuildSteps:
    """Reads how to build the environment in `folder`. Raises `TaskInvalid` if the sandbox can't have it."""
    if image := config.docker_image:
        raise TaskInvalid(f"the task needs the image {image!r}, and the sandbox has this machine's system: use Docker")
    build = read_build_steps(folder)
    if config.workdir:
        build.workdir = PurePosixPath(config.workdir)
    check_lasting(build.workdir)
    return build


def check_lasting(path: PurePosixPath) -> None:
    """Raises `TaskInvalid` if `path` can't be a folder of the task, whose files last from command to command."""
    if not path.is_absolute() or ".." in path.parts:
        raise TaskInvalid(f"{path} is not an absolute path of the sandbox")
    if path.parts[1:2] and path.parts[1] in SYSTEM and not path.is_relative_to(bubblewrap.HOME):
        raise TaskInvalid(f"{path} is this machine's in the sandbox: nothing can be put there")


class BubblewrapEnvironment(BaseEnvironment):
    """Runs the commands of a trial in sandboxes.

    `harness` is the Harbor agent whose installation is put on PATH. `base` is the parent of the sandboxes' folders
    (default: the system's temporary folder).
    """

    def __init__(self, *args: Any, harness: str = "", base: str | None = None, **kwargs: Any) -> None:
        self._runtime = self.runtime_for(harness, Path(base) if base else None)
        self._workspace: BubblewrapWorkspace | None = None
        self._build_steps = BuildSteps()
        self._reach = ""
        self._used = False  # True if a command ran since the build or the last clean-up
        self._built: BubblewrapWorkspace | None = None  # as the build left it, for a judge
        self._judge: tuple[Evidence, JudgesPlace] | None = None
        self._judgement: Mapping[str, Any] = {}
        self._one_at_a_time = asyncio.Lock()
        super().__init__(*args, **kwargs)

    @staticmethod
    def runtime_for(harness: str, base: Path | None = None) -> BubblewrapRuntime:
        """The runtime with the installation of `harness`. Raises `RuntimeFailed` if it or bubblewrap is missing."""
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
        self._build_steps = build_steps_of(self.environment_dir, self.task_env_config)

    async def _apply_network_policy(self, network_policy: Any) -> None:
        """Does nothing: the sandbox never has a network, and no policy can be stricter."""

    async def start(self, force_build: bool) -> None:
        """Creates the folders and follows the build steps. Every start builds anew, whatever `force_build` says."""
        self._workspace = await self._runtime.prepare(Empty())
        for folder in (*(self._state / "harbor" / name for name in FOLDERS), self._root / "app"):
            folder.mkdir(parents=True)
        self._make_lasting(self._build_steps.workdir)
        self._workspace.spread(self._root, Path(self._build_steps.workdir))
        for step in self._build_steps.steps:
            if isinstance(step, CopyStep):
                await self._put(step)
            else:
                await self._build(step)
        await self._run(f"mkdir -p -- {quote(str(self._build_steps.workdir))}", PurePosixPath("/"), {}, LONGEST_S)
        self._used = False
        script = _text(self.environment_dir.parent / TESTS[1:] / SCRIPT)
        if VARIABLE in script or JudgeText.of(script, (), self._workspace).only_tools:  # it may compare files with it
            self._built = await self._runtime.prepare(Empty())
            await in_thread(copy_tree, self._root, self._built.folder)
            self._built.spread(self._built.folder, self._workspace.workdir)

    async def _build(self, step: RunStep) -> None:
        workdir = quote(str(step.workdir))
        result = await self.exec(f"mkdir -p -- {workdir} && cd {workdir} && {step.command}", cwd="/")
        if result.return_code:
            lines = (result.stdout or "").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {result.return_code}"
            raise SandboxBuildFailedError(f"RUN {step.command[:200]} fails without Docker: {reason}")

    async def stop(self, delete: bool) -> None:
        """Removes all folders, whatever `delete` says: Harbor has downloaded what it keeps."""
        for workspace in (self._workspace, self._built):
            if workspace is not None:
                await workspace.close()

    @contextmanager
    def reaching(self, endpoint: Endpoint) -> Iterator[None]:
        """Lets commands reach `endpoint` inside the `with` block, at the address that `inside` returns."""
        self._reach = endpoint.base_url
        try:
            yield
        finally:
            self._reach = ""

    def inside(self, endpoint: Endpoint) -> Endpoint:
        """`endpoint` with its address inside the sandbox."""
        return self._running_workspace.endpoint(endpoint)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Runs a shell command in its own sandbox.

        Raises `TaskInvalid` for a user that the sandbox does not have, `RuntimeError` when the time is over.
        """
        name = self._resolve_user(user)
        if name is not None and str(name) not in ONE_USER:
            raise TaskInvalid(f"the sandbox has one user, and the task asks for {name!r}: use Docker")
        self._used = True
        variables = {**self._build_steps.env, **(self._merge_env(env) or {})}
        workdir = PurePosixPath(cwd or self._build_steps.workdir)
        if self._judge is None:
            exit_ = await self._run(command, workdir, variables, float(timeout_sec or LONGEST_S))
        else:
            exit_ = await self._run_judge(*self._judge, self._launch(command, workdir, variables))
        if exit_.ending is Ending.TIMED_OUT:
            raise RuntimeError(f"the command ran past {timeout_sec} s")
        return ExecResult(stdout=exit_.output, return_code=137 if exit_.code is None else exit_.code)

    async def _run(
        self, command: str, workdir: PurePosixPath, env: Mapping[str, str], timeout: float, transfer: Path | None = None
    ) -> Exit:
        """Runs a shell command in its own sandbox, with the folder `transfer`, if any, at `TRANSFER`."""
        self._make_lasting(workdir)
        launch = self._launch(command, workdir, env)
        if transfer is not None:
            launch = replace(launch, mounts={**launch.mounts, TRANSFER: transfer})
        async with self._one_at_a_time:
            return await self._running_workspace.run(launch, self._limits, timeout, reach=self._reach)

    def _launch(self, command: str, workdir: PurePosixPath, env: Mapping[str, str]) -> Command:
        mounts = {f"/{entry.name}": entry for entry in (self._state / "harbor").iterdir()}
        shell = ("/bin/bash", "-c", 'cd -- "$1" && exec /bin/bash -c "$2"', "bash", str(workdir), command)
        return Command(shell, env, mounts=mounts)

    async def _run_judge(self, evidence: Evidence, place: JudgesPlace, launch: Command) -> Exit:
        """Runs a command of the verifier. Adds to the judgement, unless it used no helper and another one did."""
        async with self._one_at_a_time:
            end = await run_program(evidence, place, "the verifier", launch)
        if UNPROTECTED not in self._judgement or end.detail.get(UNPROTECTED) != NOT_USED:
            self._judgement = {**self._judgement, UNPROTECTED: "", **end.detail}
            (self.trial_paths.trial_dir / JUDGEMENT).write_text(json.dumps(self._judgement), encoding="utf-8")
        return end.exit

    async def upload_file(self, source_path: Path | str, target_path: Location) -> None:
        target = PurePosixPath(target_path)
        await self._put(CopyStep(Path(source_path), target.parent, target.name))

    async def upload_dir(self, source_dir: Path | str, target_dir: Location) -> None:
        """Copies a folder into the sandbox. The upload of the tests first clears what the agent left."""
        if str(target_dir) == TESTS and self._used:
            self._used = False
            await self._running_workspace.clear_home()
            for name in ("tests", "tmp", VERIFIER_LOGS):
                await in_thread(empty_folder, self._state / "harbor" / name)
            self._judge = await self._prepare_judge(_text(Path(source_dir) / SCRIPT))
        await self._put(CopyStep(Path(source_dir), PurePosixPath(target_dir)))

    async def _prepare_judge(self, script: str) -> tuple[Evidence, JudgesPlace]:
        agents, built = self._running_workspace, self._built

        async def clean_workspace() -> Workspace:
            if built is None:
                raise EvaluatorFailed(f"the tests at the task's {TESTS[1:]}/{SCRIPT} are not those that are uploaded")
            return built

        task, done = Task(self.environment_name, ""), Exit(Ending.DONE, 0.0, 0)
        evidence = Evidence(task, done, agents, clean_workspace, replace(self._limits, evaluate_s=LONGEST_S))
        place, self._judgement = await place_of(evidence, script)
        return evidence, place

    async def download_file(self, source_path: Location, target_path: Path | str) -> None:
        """Copies a file out of the sandbox. Raises `RuntimeFailed` if it is not a regular file."""
        with tempfile.TemporaryDirectory(dir=self._state) as folder:
            await self._copy_inside(f"cp -- {quote(str(source_path))} {TRANSFER}/it", folder)
            await in_thread(_copy_regular, Path(folder, "it"), Path(target_path))

    async def download_dir(self, source_dir: Location, target_dir: Path | str) -> None:
        """Copies regular files and folders out of the sandbox. Skips links: the agent's may point anywhere."""
        with tempfile.TemporaryDirectory(dir=self._state) as folder:
            await self._copy_inside(f"cp -a -- {quote(f'{source_dir}/.')} {TRANSFER}/", folder)
            budget = CopyBudget(MOST_BYTES, MOST_FILES)
            await in_thread(copy_out, LeftFiles(Path(folder)), Path(target_dir), budget)

    async def _put(self, step: CopyStep) -> None:
        """Copies a file or folder into the sandbox. Raises `TaskInvalid` if the target is not the task's."""
        check_lasting(step.folder)
        self._make_lasting(step.folder)
        parent, target = quote(str(step.folder)), quote(str(step.folder / step.name))
        with tempfile.TemporaryDirectory(dir=self._state) as folder:
            name = await in_thread(_stage, step.source, Path(folder, "it"))
            await self._copy_inside(f"mkdir -p -- {parent} && cp -a -- {TRANSFER}/{name} {target}", folder)

    async def _copy_inside(self, command: str, folder: str) -> None:
        """Runs a copy command that sees `folder` at `TRANSFER`. Raises `RuntimeFailed` if it fails."""
        exit_ = await self._run(command, PurePosixPath("/"), {}, LONGEST_S, Path(folder))
        if exit_.code:
            raise RuntimeFailed(f"can't copy into or out of the sandbox: {exit_.output.strip()[-300:]}")

    def _make_lasting(self, path: PurePosixPath) -> None:
        """Creates the top-level folder of `path`, unless it is the system's. Its files last from command to command."""
        first = "".join(path.parts[1:2])
        if first and first not in SYSTEM | OF_HARBOR | {".."}:
            (self._root / first).mkdir(exist_ok=True)

    @property
    def _running_workspace(self) -> BubblewrapWorkspace:
        if self._workspace is None:
            raise RuntimeFailed("the environment has not been started")
        return self._workspace

    @property
    def _state(self) -> Path:
        """The folder that holds all others of this environment. Commands see some of those, but never this one."""
        return self._running_workspace.home_folder.parent

    @property
    def _root(self) -> Path:
        """The working copy, the parent of the task's folders: `root/app` is `/app` in the sandbox."""
        return self._state / "root"

    @property
    def _limits(self) -> Limits:
        config, limits = self.task_env_config, Limits()
        memory, disk = config.memory_mb or limits.memory_mb, config.storage_mb or limits.disk_mb
        return Limits(memory_mb=memory, disk_mb=disk)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _stage(source: Path, copy: Path) -> str:
    """Copies `source` to `copy`, so that nothing in a sandbox can change the original.

    The sandbox's user is this process's user, who owns the copy: modes stay as they are, as `ssh` and `psql` want them
    of keys and passwords. Returns the argument for `cp`, relative to the parent of `copy`.
    """
    if source.is_dir():
        shutil.copytree(source, copy)
        return f"{copy.name}/."
    shutil.copy2(source, copy)
    return copy.name


def _copy_regular(source: Path, target: Path) -> None:
    if not stat.S_ISREG(source.lstat().st_mode):
        raise RuntimeFailed(f"{target.name} is not a regular file in the sandbox")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    CopyBudget(MOST_BYTES, 1).copy(LeftFiles(source.parent), source.name, target)
