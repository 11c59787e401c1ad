"""The initial content of a working copy: callables that fill an empty folder (`base.Source`).

A task's paths must stay in the folder that is filled. They are checked when the source is created.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.runtimes.shown import private_paths


def inside(path: str) -> PurePosixPath:
    """`path` as a relative path. Raises `TaskInvalid` if it is absolute or leaves its folder."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\0" in path:
        raise TaskInvalid(f"the path {path!r} leaves the task's folder; use a relative path without '..'")
    return pure


def located(base: Path, path: str) -> Path:
    """An absolute path as it is, a relative one below `base`. Raises `TaskInvalid` if it leaves `base`."""
    return Path(path) if Path(path).is_absolute() else base / inside(path)


@dataclass(frozen=True, slots=True)
class Empty:
    """An empty folder."""

    def __call__(self, folder: Path) -> None:
        return


@dataclass(frozen=True, slots=True)
class Files:
    """Files by relative path, with their text."""

    files: Mapping[str, str]

    def __post_init__(self) -> None:
        for path in self.files:
            inside(path)

    def __call__(self, folder: Path) -> None:
        for path, text in self.files.items():
            target = folder / inside(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Folder:
    """A copy of a folder, without rolltap's own data and settings. Shares blocks with the original if the file system
    supports it (reflinks)."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise TaskInvalid(f"the task's folder {self.path} does not exist")

    def __call__(self, folder: Path) -> None:
        command = ["cp", "-a", "--reflink=auto", f"{self.path}/.", str(folder)]
        _run(command, f"can't copy {self.path}")
        for path in private_paths(self.path):
            copy = folder / path
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class GitCommit:
    """A repository at a commit, with the commit's history and nothing later.

    Later commits contain the answer to many tasks, and a clone would include them. So a base with only the commit's
    history is made once, in `cache`, and each working copy is a copy of that base (with shared blocks if the file
    system supports it).
    """

    repository: Path
    commit: str
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not (self.repository / ".git").exists() and not (self.repository / "objects").exists():
            raise TaskInvalid(f"{self.repository} is not a git repository")
        if self.commit.startswith("-"):
            raise TaskInvalid(f"{self.commit!r} is not a commit")

    def __call__(self, folder: Path) -> None:
        Folder(self.base())(folder)

    def base(self) -> Path:
        """The base's folder, created if it is missing. Safe to call from many threads and processes."""
        if shutil.which("git") is None:
            raise RuntimeFailed("git is not installed; install it to use repositories as task sources")
        resolve = ["git", "-C", str(self.repository), "rev-parse", "--verify", "--quiet", f"{self.commit}^{{commit}}"]
        commit = _run(resolve, f"no commit {self.commit} in {self.repository}").strip()
        name = hashlib.sha256(f"{self.repository.resolve()}\0{commit}".encode()).hexdigest()[:20]
        cache = self.cache or Path.home() / ".cache" / "rolltap" / "sources"
        base = cache / name
        if not base.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cache))
            try:
                self._make(draft, commit)
                draft.rename(base)
            except OSError:
                if not base.is_dir():  # a real failure: no other process created it meanwhile
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return base

    def _make(self, folder: Path, commit: str) -> None:
        git = ["git", "-C", str(folder)]
        _run([*git, "init", "-q"], "git can't make a repository")
        serve = "git -c uploadpack.allowAnySHA1InWant=true upload-pack"
        fetch = [*git, "fetch", "-q", "--no-tags", f"--upload-pack={serve}", str(self.repository.resolve()), commit]
        _run(fetch, f"can't fetch {commit} of {self.repository}")
        _run([*git, "checkout", "-q", "-B", "main", commit], f"can't check out {commit} of {self.repository}")
        (folder / ".git" / "FETCH_HEAD").unlink(missing_ok=True)


def _run(command: list[str], failure: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        raise RuntimeFailed(f"{failure}: {result.stderr.strip() or result.returncode}")
    return result.stdout
