"""Runs in the current folder itself, for one run that a person started. Only HOME is temporary.

A harness that runs unattended gets no answers, so its definition starts it without questions. It runs in the sandbox,
where it sees only this folder and the proxy, unless the person accepts that it may do whatever the person can.
Two kinds run without a sandbox, with the person's rights: the person's own command, and an agent in the runner's
process.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.agents.install import Installation, not_installed
from rolltap.harnesses.base import Command, Harness, Source
from rolltap.harnesses.runner.specs import SAMPLE_JOB
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime, BubblewrapWorkspace
from rolltap.harnesses.runtimes.folders import make_folders
from rolltap.harnesses.runtimes.process import ProcessWorkspace
from rolltap.harnesses.runtimes.shown import mounts_of, private_paths
from rolltap.harnesses.threads import in_thread

APPROVALS_OFF = frozenset(
    {
        "--auto-approve",
        "--dangerously-bypass-approvals-and-sandbox",
        "--dangerously-skip-permissions",
        "--yolo",
        "--allow-all-tools",
        "--yes-always",
    }
)
"""Switches that a message names. In a command of the person's own they are the sign that it acts without asking."""


def acts_unasked(harness: Harness) -> str:
    """How the harness is started to act without asking, for a message; "" for what runs as the person does."""
    launch = harness.launch(SAMPLE_JOB)
    if not isinstance(launch, Command):
        return ""
    if switch := next((word for word in launch.argv if word in APPROVALS_OFF), ""):
        return f"with {switch}"
    return "" if isinstance(harness, AnyCommand) else "without asking"


def runtime_here(
    harness: Harness, installation: Installation | None, *, unsandboxed: bool
) -> tuple[CurrentFolderRuntime, str]:
    """The runtime for this folder, and a notice for the person. Raises `RuntimeFailed` if there is no sandbox or the
    harness is not installed."""
    folder, bins = Path.cwd(), installation.bins if installation else ()
    how, package = acts_unasked(harness), harness.package
    is_missing = installation is None and package is not None and shutil.which(package.executable) is None
    if is_missing and isinstance(harness.launch(SAMPLE_JOB), Command):
        raise RuntimeFailed(not_installed(harness))
    if not how or unsandboxed:
        notice = f"{harness.name} runs {how or 'without a sandbox'}: it may do whatever you can"
        return CurrentFolderRuntime(folder, bins), notice
    if refusal := bubblewrap.refusal():
        raise RuntimeFailed(
            f"{harness.name} is started {how} and no sandbox can be made here ({refusal.splitlines()[0]}): "
            "apt install bubblewrap, or let it do whatever you can with --no-sandbox"
        )
    if installation is None and harness.package is not None:
        raise RuntimeFailed(
            f"{harness.name} runs in a sandbox, which needs its own installation: rolltap harness install "
            f"{harness.name}; or let it do whatever you can with --no-sandbox"
        )
    needs = installation.needs if installation else ()
    notice = (
        f"{harness.name} runs in a sandbox: it sees this folder, without rolltap's keys and records, and the proxy "
        "only; it can't write where your tools run programs, such as .git/hooks and .vscode (--no-sandbox: all you see)"
    )
    return CurrentFolderRuntime(folder, bins, BubblewrapRuntime(None, bins, needs)), notice


@dataclass(frozen=True, slots=True)
class CurrentFolderRuntime:
    """Runs in `folder`: in `sandbox`, else with the caller's own PATH after `bins`. The folder is not filled from the
    source."""

    folder: Path
    bins: tuple[Path, ...] = ()
    sandbox: BubblewrapRuntime | None = None
    name: str = "here"

    async def prepare(self, source: Source) -> ProcessWorkspace | BubblewrapWorkspace:
        if self.sandbox is not None:
            workspace = await self.sandbox.prepare(source)
            workspace.folder = self.folder
            hidden = workspace.hidden = await in_thread(private_paths, self.folder)
            mounts = await in_thread(mounts_of, self.folder)
            workspace.read_only = [each for each in mounts if each.path not in hidden]
            return workspace
        path = os.pathsep.join([*map(str, self.bins), os.environ.get("PATH", os.defpath)])
        workspace = ProcessWorkspace(await make_folders(None, source), path)
        workspace.folder = workspace.workdir = self.folder
        return workspace
