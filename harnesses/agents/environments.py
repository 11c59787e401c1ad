"""Plays environments of other packages. A driver runs in a process of the package's Python and reports the score.

A driver (`drivers/rolltap_*.py.txt`) has up to three steps: `tasks` lists an environment's tasks, `play` plays one with
the session's model, `score` scores the answer of an agent that does not know the environment. The driver reads its job
from stdin and prints a signed result. Only the runner, its evaluator and the driver know the key of the signature.
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
from importlib.resources import files
from pathlib import Path
from typing import Any

from rolltap.errors import NoReward, TaskInvalid
from rolltap.harnesses.base import Command, Job, last_line, refuse_resume
from rolltap.harnesses.runtimes.shown import private_paths, python_folders

log = logging.getLogger("rolltap.environments")

NAME = "environment"
"""Name of the harness that plays an environment, and of the evaluator that reads its score."""

FOLDER = ".rolltap"
MISSING = 54
"""The driver's exit code if its package is not installed."""

LISTING_S = 600.0

_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class EnvironmentPackage:
    """A package whose environments can be played.

    `module` is its Python module, `requirement` its name on the package index, `tested` the release that was tested,
    and `driver` the file that plays it. If `scores` is true, its scorer can judge the answer of any harness.
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
    "nemo-gym": EnvironmentPackage("nemo_gym", "nemo-gym", "0.4.0", "rolltap_nemo_gym", scores=True),
}


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """One step of a driver. `values` is the step's part of the job, JSON."""

    package: str
    python: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def command(self, name: str, home: Path, proof_key: str) -> Command:
        """The command that runs the step `name`. The driver's files go below `home`, the job with the key to stdin."""
        package = package_of(self.package)
        job = {"proof_key": proof_key, "step": name, "driver": package.driver, "module": package.module, **self.values}
        paths = {"environment": f"{FOLDER}/environment.py", package.driver: f"{FOLDER}/{package.driver}.py"}
        drivers = files("rolltap.harnesses.agents.drivers")
        return Command(
            (self.python, str(home / FOLDER / "environment.py")),
            files={path: drivers.joinpath(f"{name}.py.txt").read_text("utf-8") for name, path in paths.items()},
            stdin=json.dumps(job),
        )


def package_of(name: str) -> EnvironmentPackage:
    """Raises `TaskInvalid` if the package is unknown."""
    if name not in PACKAGES:
        raise TaskInvalid(f"no package {name!r} of environments; known: {', '.join(PACKAGES)}", param="package")
    return PACKAGES[name]


@dataclass(frozen=True, slots=True)
class EnvironmentLoop:
    """Plays one task of an environment with the session's model, in the package's own loop.

    There is no agent program: the model only answers the environment's requests.
    """

    step: EnvironmentStep
    name: str = NAME
    package: None = None
    dialect: str = "openai_chat"
    quirks: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[Path, ...]:
        """The folders that a sandbox must show: those of its Python, and the environment's own."""
        return (*python_folders(self.step.python), *own_folder(self.step.values["where"]))

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        endpoint = job.endpoint
        model = {"url": endpoint.v1, "key": endpoint.key, "model": endpoint.model, "roles": tuple(endpoint.roles)}
        values = {**self.step.values, **model, "turns": job.limits.turns, "instruction": job.instruction}
        return replace(self.step, values=values).command(
            "play", job.home, proof_key(endpoint.base_url.rpartition("/s/")[2])
        )


def proof_key(session_id: str) -> str:
    """The key that signs the session's results, in hexadecimal. Only this process and the driver know it."""
    return hmac.new(_SECRET, session_id.encode(), "sha256").hexdigest()


def signed_result(output: str, key: str) -> Mapping[str, Any] | None:
    """The result in the driver's output that is signed with `key`; None if there is none.

    Raises `NoReward` if two different ones are signed: something else has the key, and neither can be trusted.
    """
    found: set[str] = set()
    for line in output.splitlines():
        if not line.startswith('{"proof": '):
            continue
        try:
            message = json.loads(line)
            proof, result = str(message["proof"]), str(message["result"])
            expected = hmac.new(bytes.fromhex(key), result.encode(), "sha256").hexdigest()
            is_signed = hmac.compare_digest(proof.encode(), expected.encode())
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if is_signed:
            found.add(result)
    if len(found) > 1:
        raise NoReward("the environment's output has different signed results: it was tampered with")
    return json.loads(found.pop()) if found else None


def list_tasks(package: str, python: str, values: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The environment's tasks: `sample` (by which the driver finds the task again), `id` and `instruction` of each.

    Runs the environment's code with the user's rights, as evaluators do. Raises `TaskInvalid` if that fails; if the
    package is missing, the message says what to install.
    """
    key = secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="rolltap-environment-") as home:
        command = EnvironmentStep(package, python, values).command("tasks", Path(home), key)
        for name, text in command.files.items():
            path = Path(home) / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        try:
            process = subprocess.run(
                command.argv, input=command.stdin, capture_output=True, text=True, timeout=LISTING_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TaskInvalid(f"can't list the tasks with {python}: {error}", param="python") from error
    if process.returncode == MISSING:
        missing = package_of(package)
        raise TaskInvalid(
            f"{python} has no {missing.module}: {python} {missing.install}, "
            "or name the Python that has it with --python",
            param="python",
        )
    result = signed_result(process.stdout, key)
    if result is None:
        raise TaskInvalid(f"{package} can't list the tasks of {values['where']}: {last_line(process.stderr)}")
    if result["version"] != package_of(package).tested:
        log.warning("%s %s was not tested here; tested: %s", package, result["version"], package_of(package).tested)
    return result["tasks"]


def own_folder(where: str) -> tuple[Path, ...]:
    """The folder of an environment that is a file; empty for one that is a name.

    The sandbox shows the whole folder. Raises `TaskInvalid` if it is `/`, HOME or holds data or settings of rolltap.
    """
    file = Path(where.partition("@")[0])
    if file.suffix != ".py":
        return ()
    if file.parent in (Path("/"), Path.home()) or private_paths(file.parent):
        raise TaskInvalid(f"put {file.name} into a folder of its own: the sandbox shows the folder that it lies in")
    return (file.parent,)
