"""The runtimes that a task can name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rolltap.errors import TaskInvalid
from rolltap.harnesses.base import Runtime
from rolltap.harnesses.runtimes import bubblewrap
from rolltap.harnesses.runtimes.apptainer import ApptainerRuntime
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.docker import DockerRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.thread import ThreadRuntime

AUTO = "auto"
"""`bubblewrap` where it works, else `process`; `thread` for agents that are Python calls."""


def resolve(name: str, *, python_call: bool) -> str:
    """What `auto` (or nothing) stands for on this machine; any other name as it is."""
    if name not in ("", AUTO):
        return name
    if python_call:
        return "thread"
    return "process" if bubblewrap.refusal() else "bubblewrap"


class Make(Protocol):
    """`bins` go on PATH, `needs` are the folders that hold them, `image` is for containers."""

    def __call__(
        self, *, base: Path | None, bins: tuple[Path, ...], needs: tuple[Path, ...], image: str
    ) -> Runtime: ...


def _without_image(name: str, image: str) -> None:
    if image:
        raise TaskInvalid(f"the runtime {name!r} has no images; use 'docker' or 'apptainer'", param="image")


def _thread(*, base: Path | None, bins: tuple[Path, ...], needs: tuple[Path, ...], image: str) -> Runtime:
    _without_image("thread", image)
    return ThreadRuntime(base)


def _process(*, base: Path | None, bins: tuple[Path, ...], needs: tuple[Path, ...], image: str) -> Runtime:
    _without_image("process", image)
    return ProcessRuntime(base, bins)


def _bubblewrap(*, base: Path | None, bins: tuple[Path, ...], needs: tuple[Path, ...], image: str) -> Runtime:
    _without_image("bubblewrap", image)
    return BubblewrapRuntime(base, bins, needs)


def _docker(*, base: Path | None, bins: tuple[Path, ...], needs: tuple[Path, ...], image: str) -> Runtime:
    return DockerRuntime(image, base)


def _apptainer(*, base: Path | None, bins: tuple[Path, ...], needs: tuple[Path, ...], image: str) -> Runtime:
    return ApptainerRuntime(image, base)


RUNTIMES: Mapping[str, Make] = {
    "thread": _thread,
    "process": _process,
    "bubblewrap": _bubblewrap,
    "docker": _docker,
    "apptainer": _apptainer,
}
