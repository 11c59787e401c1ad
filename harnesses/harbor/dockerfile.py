"""Reads a task's Dockerfile as build steps for a sandbox that uses this machine's system.

`FROM` has no effect: the base is this machine's system. `WORKDIR`, `ENV`, and `COPY` (or `ADD`) of files of the task's
folder are followed. `RUN` runs in the sandbox, so it can change only the task's folders. If it needs more, it fails,
and the trial fails with it. An instruction that would change the system is refused with its line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rolltap.errors import TaskInvalid
from rolltap.harnesses.runtimes.sources import inside

WITHOUT_EFFECT = {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "SHELL"}
"""Instructions about the image or the container's own process. They have no effect: Harbor starts every command."""

WORKDIR = PurePosixPath("/app")
"""The working directory if the Dockerfile sets none."""


@dataclass(frozen=True, slots=True)
class CopyStep:
    """Copies the file `source` to `name` in the sandbox's `folder`; of a folder, what it holds (`name` is `.`)."""

    source: Path
    folder: PurePosixPath
    name: str = "."


@dataclass(frozen=True, slots=True)
class RunStep:
    """Runs a shell command in `workdir`."""

    command: str
    workdir: PurePosixPath


@dataclass(slots=True)
class BuildSteps:
    """How to build a task's environment: the steps in order, and its commands' working directory and variables."""

    workdir: PurePosixPath = WORKDIR
    env: dict[str, str] = field(default_factory=dict)
    steps: list[CopyStep | RunStep] = field(default_factory=list)


def read_build_steps(folder: Path) -> BuildSteps:
    """Reads the build steps of `folder`. Without a Dockerfile, all its files are copied to `/app`.

    Raises `TaskInvalid` for Docker Compose and, with the line, for an instruction that needs Docker.
    """
    dockerfile = folder / "Dockerfile"
    if (folder / "docker-compose.yaml").exists():
        raise TaskInvalid(f"{folder} is a Docker Compose environment: the sandbox has no services, use Docker")
    if not dockerfile.is_file():
        return BuildSteps(steps=[CopyStep(folder, WORKDIR)] if folder.is_dir() else [])
    build = BuildSteps()
    for number, line in instructions(dockerfile.read_text(encoding="utf-8")):
        name, _, rest = line.partition(" ")
        try:
            _follow(build, folder, name.upper(), rest.strip())
        except (TaskInvalid, ValueError) as error:
            reason = error.message if isinstance(error, TaskInvalid) else str(error)
            raise TaskInvalid(f"{dockerfile}:{number}: {name} can't be followed without Docker: {reason}") from error
    return build


def instructions(text: str) -> list[tuple[int, str]]:
    """Splits a Dockerfile into instructions, each with the number of its first line.

    Continued lines are joined; comments are left out.
    """
    entries: list[tuple[int, str]] = []
    continues = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        content = stripped.removesuffix("\\").rstrip()
        if continues:
            first_number, beginning = entries[-1]
            entries[-1] = (first_number, f"{beginning} {content}")
        else:
            entries.append((number, content))
        continues = stripped.endswith("\\")
    return entries


def _follow(build: BuildSteps, folder: Path, name: str, rest: str) -> None:
    """Adds an instruction to `build`. Raises `TaskInvalid` or `ValueError` if it can't be followed."""
    if name == "WORKDIR":
        build.workdir /= _expand(rest, build.env)
    elif name == "ENV":
        build.env.update(_pairs(rest, build.env))
    elif name in ("COPY", "ADD"):
        build.steps += _copies(build, folder, rest)
    elif name == "RUN":
        if "<<" in rest or rest.startswith(("[", "--")):
            raise TaskInvalid("only a plain command is run")
        build.steps.append(RunStep(rest, build.workdir))
    elif name not in WITHOUT_EFFECT and name != "FROM":
        raise TaskInvalid("it makes another system than this machine's")


def _copies(build: BuildSteps, folder: Path, rest: str) -> list[CopyStep]:
    """The steps of a `COPY` or `ADD`."""
    words: list[str] = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    flags = [word for word in words if word.startswith("--")]
    if any(flag.startswith("--from") for flag in flags):
        raise TaskInvalid("there are no other images")
    *names, target = [_expand(word, build.env) for word in words if word not in flags]
    sources: list[Path] = []
    for name in names:
        pattern = str(inside(name.lstrip("/") or "."))
        matches = [folder] if pattern == "." else sorted(folder.glob(pattern))
        if "://" in name or not matches:
            raise TaskInvalid(f"no file {name!r} in {folder}")
        sources += matches
    path = build.workdir / target
    target_is_folder = len(sources) > 1 or target.endswith(("/", "."))
    return [
        CopyStep(source, path)
        if source.is_dir()
        else CopyStep(source, path, source.name)
        if target_is_folder
        else CopyStep(source, path.parent, path.name)
        for source in sources
    ]


def _pairs(rest: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of an `ENV`: `NAME=VALUE ...`, or the older `NAME VALUE`."""
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        name, _, value = rest.partition(" ")
        return {name: _expand(value.strip(), env)}
    return {name: _expand(value, env) for name, _, value in (word.partition("=") for word in words)}


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Replaces `$NAME` and `${NAME}` by the variables that earlier lines set. Unknown variables are empty."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: env.get(match[1] or match[2], ""), text)
