"""The `here` runtime: the current folder itself, for one run that a person started. Only HOME is thrown away."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rolltap.harnesses.base import Source
from rolltap.harnesses.runtimes.folders import make_folders
from rolltap.harnesses.runtimes.process import ProcessWorkspace


@dataclass(frozen=True, slots=True)
class HereRuntime:
    """Runs in `folder` with the caller's own PATH behind `bins`. What a source would fill is ignored: it is there."""

    folder: Path
    bins: tuple[Path, ...] = ()
    name: str = "here"

    async def prepare(self, source: Source) -> ProcessWorkspace:
        path = os.pathsep.join([*map(str, self.bins), os.environ.get("PATH", os.defpath)])
        workspace = ProcessWorkspace(await make_folders(None, source), path)
        workspace.folder = workspace.workdir = self.folder
        return workspace
