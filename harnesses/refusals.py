"""Errors of one line, for unknown names and for unsupported features of a harness or a runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from rolltap.errors import TaskInvalid
from rolltap.harnesses.base import Job
from rolltap.wording import did_you_mean

T = TypeVar("T")


def choice(what: str, name: str, known: Mapping[str, T]) -> T:
    """`known[name]`. Raises `TaskInvalid`, with the known names, if it is unknown."""
    if name not in known:
        raise TaskInvalid(
            f"no {what} {name!r}; known: {', '.join(sorted(known))}{did_you_mean(name, known)}", param=what.split()[0]
        )
    return known[name]


def refuse_image(name: str, image: str) -> None:
    """Raises `TaskInvalid` if a task names an image for a runtime without containers."""
    if image:
        raise TaskInvalid(f"the runtime {name!r} has no images; use 'docker' or 'apptainer'", param="image")


def refuse_resume(name: str, job: Job) -> None:
    """Raises `TaskInvalid` if `job` asks harness `name` to continue an earlier conversation."""
    if job.resume:
        raise TaskInvalid(f"{name} can't continue an earlier conversation; run it afresh", param="resume")
