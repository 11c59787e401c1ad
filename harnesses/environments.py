"""Environments of other packages: a driver plays them in a process of their own Python, and says what they scored.

A driver (`drivers/rolltap_*.py.txt`) has up to three steps: `tasks` lists an environment's tasks, `play` plays one with
the session's model, `score` scores the answer of an agent that knows nothing of the environment. It gets its job by
stdin and prints a result signed with a key that only the runner, its evaluator and the driver know.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Command, Job
from rolltap.harnesses.output import last_line
from rolltap.harnesses.refusals import refuse_resume

log = logging.getLogger("rolltap.environments")

NAME = "environment"
"""The harness that plays an environment, and the evaluator that reads what it scored."""

FOLDER = ".rolltap"
MISSING = 54
"""The driver's exit code where its package is not installed."""

LISTING_S = 600.0
FOLDERS = """\
import json, os, sys
runs = [os.path.dirname(path) for path in (sys.executable, os.path.realpath(sys.executable))]
print(json.dumps([*sys.path[1:], *runs, sys.prefix, sys.base_prefix]))
"""
_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class EnvironmentPackage:
    """A package whose environments can be played.

    `module` is imported, `requirement` and `tested` are its name on the package index and the release that was tried,
    `driver` the file that plays it. With `scores` its scorer can judge the answer of any harness.
    """

    module: str
    requirement: str
    tested: str
    driver: str
    scores: bool = False

    @property
    def install(self) -> str:
        return f"-m pip install {self.requirement}=={self.tested}"


PACKAGES: Mapping[str, EnvironmentPackage] = {
    "verifiers": EnvironmentPackage("verifiers", "verifiers", "0.4.0", "rolltap_verifiers", scores=True),
    "inspect": EnvironmentPackage("inspect_ai", "inspect_ai", "0.3.285", "rolltap_inspect", scores=True),
    "gymnasium": EnvironmentPackage("gymnasium", "gymnasium", "1.4.0", "rolltap_gymnasium"),
    "openenv": EnvironmentPackage("openenv", "openenv", "0.10.0", "rolltap_openenv"),
}


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """One step of a driver. `values` are what it needs to know, JSON."""

    package: str
    python: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def command(self, name: str, home: Path, proof_key: str) -> Command:
        package = package_of(self.package)
        job = {"step": name, "driver": package.driver, "module": package.module, "proof_key": proof_key, **self.values}
        names = {"environment": f"{FOLDER}/environment.py", package.driver: f"{FOLDER}/{package.driver}.py"}
        drivers = files("rolltap.harnesses.drivers")
        return Command(
            (self.python, str(home / FOLDER / "environment.py")),
            files={path: drivers.joinpath(f"{name}.py.txt").read_text("utf-8") for name, path in names.items()},
            stdin=json.dumps(job),
        )


def package_of(name: str) -> EnvironmentPackage:
    if name not in PACKAGES:
        raise TaskInvalid(f"no package {name!r} of environments; known: {', '.join(PACKAGES)}", param="package")
    return PACKAGES[name]


@dataclass(frozen=True, slots=True)
class EnvironmentLoop:
    """Plays one task of an environment with the session's model, by the package's own loop.

    Nothing of it is an agent: the model only says what the environment asks it for.
    """

    step: EnvironmentStep
    name: str = NAME
    package: None = None
    dialect: str = "openai_chat"
    quirks: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[Path, ...]:
        """The folders that a sandbox must show: those that its Python imports from, and the environment's own."""
        return (*python_folders(self.step.python), *own_folder(self.step.values["where"]))

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        endpoint = job.endpoint
        model = {"url": endpoint.v1, "key": endpoint.key, "model": endpoint.model, "roles": endpoint.roles}
        values = {**self.step.values, **model, "turns": job.limits.turns, "instruction": job.instruction}
        return replace(self.step, values=values).command(
            "play", job.home, proof_key(endpoint.base_url.rpartition("/s/")[2])
        )


def proof_key(session_id: str) -> str:
    """What results of the session are signed with, in hexadecimal. Known to this process and the driver only."""
    return hmac.new(_SECRET, session_id.encode(), "sha256").hexdigest()


def signed_result(output: str, key: str) -> Mapping[str, Any] | None:
    """The driver's result among what was printed; None where there is none, or none that `key` signed."""
    for line in reversed(output.splitlines()):
        if not line.startswith('{"proof": '):
            continue
        try:
            told = json.loads(line)
            proof, result = str(told["proof"]), str(told["result"])
        except (ValueError, KeyError, TypeError):
            continue
        expected = hmac.new(bytes.fromhex(key), result.encode(), "sha256").hexdigest()
        if hmac.compare_digest(proof.encode(), expected.encode()):
            return json.loads(result)
    return None


def list_tasks(package: str, python: str, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The environment's tasks: `sample` (how the driver finds it again), `id` and `instruction` of each.

    Runs the environment's code with the user's rights, as evaluators are run. `TaskInvalid` says what to install.
    """
    key = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="rolltap-environment-") as home:
        command = EnvironmentStep(package, python, values).command("tasks", Path(home), key)
        for name, text in command.files.items():
            path = Path(home) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        try:
            done = subprocess.run(
                command.argv, input=command.stdin, capture_output=True, text=True, timeout=LISTING_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TaskInvalid(f"can't list the tasks with {python}: {error}", param="python") from error
    if done.returncode == MISSING:
        known = package_of(package)
        raise TaskInvalid(
            f"{python} has no {known.module}: {python} {known.install}, or name the Python that has it with --python",
            param="python",
        )
    result = signed_result(done.stdout, key)
    if result is None:
        raise TaskInvalid(f"{package} can't list the tasks of {values['where']}: {last_line(done.stderr)}")
    if result["version"] != package_of(package).tested:
        log.warning("%s %s was not tested here; tested: %s", package, result["version"], package_of(package).tested)
    return result["tasks"]


def own_folder(where: str) -> tuple[Path, ...]:
    """The folder of an environment that is a file: it is shown in the sandbox, so it holds nothing else."""
    file = Path(where.partition("@")[0])
    if file.suffix != ".py":
        return ()
    if file.parent in (Path("/"), Path.home()) or (file.parent / "rolltap-data").exists():
        raise TaskInvalid(f"put {file.name} into a folder of its own: the sandbox shows the folder that it lies in")
    return (file.parent,)


@cache
def python_folders(python: str) -> tuple[Path, ...]:
    """The folders outside the system's own that an interpreter runs and imports from."""
    try:
        listing = subprocess.run([python, "-c", FOLDERS], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeFailed(f"can't run the environment's Python {python}: {error}") from error
    folders = {Path(path) for path in json.loads(listing) if Path(path).is_dir()}
    own = {folder for folder in folders if not folder.is_relative_to("/usr")}
    return tuple(sorted(folder for folder in own if not any(folder.is_relative_to(o) for o in own - {folder})))
