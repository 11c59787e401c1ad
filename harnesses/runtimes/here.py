"""Runs in the current folder itself, for one run that a person started. Only HOME is temporary.

Most harnesses start with their own approvals off, as nobody answers them. So they run in the sandbox, where they see
only this folder and the proxy, unless the person accepts that they may do whatever the person can.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.base import Command, Harness, Source
from rolltap.harnesses.install import Installation, not_installed
from rolltap.harnesses.private_files import private_paths
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime, BubblewrapWorkspace
from rolltap.harnesses.runtimes.folders import make_folders
from rolltap.harnesses.runtimes.process import ProcessWorkspace
from rolltap.harnesses.specs import SAMPLE_JOB

APPROVALS_OFF = frozenset(
    {
        "--dangerously-bypass-approvals-and-sandbox",
        "--dangerously-skip-permissions",
        "--yolo",
        "--allow-all-tools",
    }
)


def approvals_off(harness: Harness) -> str:
    """The argument that switches the harness's own approvals off; "" if its recipe has none."""
    launch = harness.launch(SAMPLE_JOB)
    words = launch.argv if isinstance(launch, Command) else ()
    return next((word for word in words if word in APPROVALS_OFF), "")


def runtime_here(harness: Harness, installation: Installation | None, *, unsandboxed: bool) -> tuple[HereRuntime, str]:
    """The runtime for this folder, and a notice for the person. Raises `RuntimeFailed` if there is no sandbox or the
    harness is not installed."""
    folder, bins = Path.cwd(), installation.bins if installation else ()
    switch = approvals_off(harness)
    if not switch or unsandboxed:
        package = harness.package
        is_missing = installation is None and package is not None and shutil.which(package.executable) is None
        if is_missing and isinstance(harness.launch(SAMPLE_JOB), Command):
            raise RuntimeFailed(not_installed(harness))
        means = f"with {switch}" if switch else "without a sandbox"
        notice = f"{harness.name} runs {means}: it may do whatever you can"
        return HereRuntime(folder, bins), notice
    if refusal := bubblewrap.refusal():
        raise RuntimeFailed(
            f"{harness.name} is started with {switch} and no sandbox can be made here ({refusal.splitlines()[0]}): "
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
        "only (--no-sandbox: all you see)"
    )
    return HereRuntime(folder, bins, BubblewrapRuntime(None, bins, needs)), notice


@dataclass(frozen=True, slots=True)
class HereRuntime:
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
            workspace.hidden = await asyncio.to_thread(private_paths, self.folder)
            return workspace
        path = os.pathsep.join([*map(str, self.bins), os.environ.get("PATH", os.defpath)])
        workspace = ProcessWorkspace(await make_folders(None, source), path)
        workspace.folder = workspace.workdir = self.folder
        return workspace
