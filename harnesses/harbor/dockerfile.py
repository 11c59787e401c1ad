"""What a task's Dockerfile asks for, as far as a sandbox over this machine's own system can do it.

`FROM` is this machine's system. `WORKDIR`, `ENV` and `COPY` (or `ADD`) of the folder's own files are done as written.
`RUN` runs in the sandbox, so it can change the task's folders and nothing else; it fails where it needs more, and so
does the task. Everything that would make another system is refused with its line.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from rolltap.errors import TaskInvalid
from rolltap.harnesses.sources import inside

WITHOUT_EFFECT = {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "SHELL"}
"""Of a container; every command here is started by Harbor."""

WORKDIR = PurePosixPath("/app")
"""Where commands run if the Dockerfile says nothing of it."""


@dataclass(frozen=True, slots=True)
class CopyStep:
    """`source` of this machine, to `name` in `folder`; of a folder what is in it (`name` is `.`)."""

    source: Path
    folder: PurePosixPath
    name: str = "."


@dataclass(frozen=True, slots=True)
class RunStep:
    command: str
    workdir: PurePosixPath


@dataclass(slots=True)
class EnvironmentRecipe:
    workdir: PurePosixPath = WORKDIR
    env: dict[str, str] = field(default_factory=dict)
    steps: list[CopyStep | RunStep] = field(default_factory=list)


def read_recipe(folder: Path) -> EnvironmentRecipe:
    """The recipe of `folder`; without a Dockerfile all its files are copied to `/app`. `TaskInvalid` says what can't be
    done.
    """
    dockerfile = folder / "Dockerfile"
    if (folder / "docker-compose.yaml").exists():
        raise TaskInvalid(f"{folder} is a Docker Compose environment: the sandbox has no services, use Docker")
    if not dockerfile.is_file():
        return EnvironmentRecipe(steps=[CopyStep(folder, WORKDIR)] if folder.is_dir() else [])
    recipe = EnvironmentRecipe()
    for number, line in instructions(dockerfile.read_text(encoding="utf-8")):
        name, _, rest = line.partition(" ")
        try:
            _follow(recipe, folder, name.upper(), rest.strip())
        except (TaskInvalid, ValueError) as error:
            reason = error.message if isinstance(error, TaskInvalid) else str(error)
            raise TaskInvalid(f"{dockerfile}:{number}: {name} can't be followed without Docker: {reason}") from error
    return recipe


def instructions(text: str) -> list[tuple[int, str]]:
    """The instructions with the number of their first line; continued lines are joined, comments left out."""
    joined: list[tuple[int, str]] = []
    open_line = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        words = stripped.removesuffix("\\").rstrip()
        if open_line:
            joined[-1] = (joined[-1][0], f"{joined[-1][1]} {words}")
        else:
            joined.append((number, words))
        open_line = stripped.endswith("\\")
    return joined


def _follow(recipe: EnvironmentRecipe, folder: Path, name: str, rest: str) -> None:
    if name == "WORKDIR":
        recipe.workdir /= _expanded(rest, recipe.env)
    elif name == "ENV":
        recipe.env.update(_pairs(rest, recipe.env))
    elif name in ("COPY", "ADD"):
        recipe.steps += _copies(recipe, folder, rest)
    elif name == "RUN":
        if "<<" in rest or rest.startswith(("[", "--")):
            raise TaskInvalid("only a plain command is run")
        recipe.steps.append(RunStep(rest, recipe.workdir))
    elif name not in WITHOUT_EFFECT and name != "FROM":
        raise TaskInvalid("it makes another system than this machine's")


def _copies(recipe: EnvironmentRecipe, folder: Path, rest: str) -> list[CopyStep]:
    words: list[str] = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    flags = [word for word in words if word.startswith("--")]
    if any(flag.startswith("--from") for flag in flags):
        raise TaskInvalid("there are no other images")
    *names, target = [_expanded(word, recipe.env) for word in words if word not in flags]
    sources: list[Path] = []
    for name in names:
        pattern = str(inside(name.lstrip("/") or "."))
        found = [folder] if pattern == "." else sorted(folder.glob(pattern))
        if "://" in name or not found:
            raise TaskInvalid(f"no file {name!r} in {folder}")
        sources += found
    path = recipe.workdir / target
    into = len(sources) > 1 or target.endswith(("/", "."))
    return [
        CopyStep(source, path)
        if source.is_dir()
        else CopyStep(source, path, source.name)
        if into
        else CopyStep(source, path.parent, path.name)
        for source in sources
    ]


def _pairs(rest: str, env: Mapping[str, str]) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        name, _, value = rest.partition(" ")
        return {name: _expanded(value.strip(), env)}
    return {name: _expanded(value, env) for name, _, value in (word.partition("=") for word in words)}


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """`text` with `$NAME` and `${NAME}` of the variables that were set before."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda match: env.get(match[1] or match[2], ""), text)
