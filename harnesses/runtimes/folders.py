"""The folders of a workspace: `work` is the working copy, `home` the temporary HOME, `tmp` its scratch. `out` is the
run's output. All are below one root, which is removed as a whole.

The working copy of a repository is an overlay over its base if it can be mounted, else a copy. `remove_traps` removes
links and pipes that would mislead or block an evaluator's program, in every runtime: a link to what only this program
has (hidden answers, its descriptors, its HOME) would be read as the agent's answer, and a pipe in place of a file would
block it.
"""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

from rolltap.errors import RolltapError, RuntimeFailed, Unreadable
from rolltap.harnesses.base import (
    OWN_CONFIGURATION,
    CodeHelper,
    CodeWork,
    Command,
    Endpoint,
    Limits,
    RunOutput,
    Source,
    Workspace,
)
from rolltap.harnesses.left_files import LeftFiles, remove
from rolltap.harnesses.runtimes.code_sandbox import CodeRequest, CodeSandbox, DirectHelper, Pipes, folder_inside
from rolltap.harnesses.runtimes.disk import (
    disks_work,
    mount,
    mount_disk,
    mounts_below,
    overlay_works,
    unmount,
    unmount_disk,
)
from rolltap.harnesses.runtimes.sources import GitCommit, inside
from rolltap.harnesses.threads import in_thread


@dataclass(frozen=True, slots=True)
class Folders:
    root: Path

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def write_home(self, files: Mapping[str, str]) -> None:
        """Writes `files`, keyed by path below HOME, readable only by their owner.

        What an earlier run left in their places is removed, whatever it is, and never followed or written into: a file
        may have another name elsewhere, and a pipe would wait for a reader.
        """
        for name, text in files.items():
            folder = self.home
            for part in inside(name).parts[:-1]:
                folder = folder / part
                if folder.is_symlink() or not folder.is_dir():
                    remove(folder)
                folder.mkdir(mode=0o700, exist_ok=True)
                if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                    folder.chmod(0o700)
            target = folder / inside(name).name
            remove(target)
            with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)

    def clear_home(self) -> None:
        """Replaces `home` and `tmp` by empty folders, also if an agent replaced them."""
        for path in (self.home, self.tmp):
            empty_folder(path)


class FolderWorkspace:
    """The base of all workspaces: folders of this machine, which the agent sees at `workdir` and `home`."""

    runtime: ClassVar[str] = "of a plugin"
    interpreter: ClassVar[str] = ""
    """A Python in its sandboxes, as a script's first line has it; "" without sandboxes."""

    def __init__(self, folders: Folders, workdir: Path | None = None, home: Path | None = None) -> None:
        self._folders = folders
        self.folder = folders.work
        self.home_folder = folders.home
        self.workdir = workdir or folders.work
        self.home = home or folders.home
        self._output: RunOutput | None = None

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        return endpoint

    def output(self) -> str:
        """The output of the last run; of a stopped run, the output until then."""
        return self._output.text() if self._output else ""

    async def new_output(self) -> RunOutput:
        """The file for the output of the next run."""
        try:
            self._folders.out.unlink(missing_ok=True)
        except OSError:  # an earlier run left a folder there
            await in_thread(remove, self._folders.out)
        self._output = RunOutput(self._folders.out)
        return self._output

    @property
    def places(self) -> Mapping[Path, Path]:
        return {self.workdir: self.folder}

    @property
    def is_sandboxed(self) -> bool:
        return bool(self.interpreter)

    @asynccontextmanager
    async def code_helper(
        self, limits: Limits, deadline: float, work: CodeWork | None = None
    ) -> AsyncIterator[CodeHelper]:
        system = SYSTEM if self.interpreter else (*SYSTEM, PurePosixPath(sys.base_prefix))  # of virtual environments
        removed = await in_thread(remove_all_traps, self.places, system)
        if not self.interpreter:
            yield DirectHelper(f"the runtime {self.runtime!r} has no sandbox for it", removed=removed)
            return
        root = self._folders.root / "code"
        await in_thread(empty_folder, root)
        helper = root / "helper"
        helper.mkdir()

        failures = list[Unreadable]()
        folder = work.folder if work else root / "work"
        one_at_a_time = asyncio.Lock()

        async def run(request: CodeRequest, pipes: Pipes) -> int:
            folders = await in_thread(_make_code_folders, root)
            try:
                async with one_at_a_time:
                    if not folder.exists():
                        await in_thread(copy_tree, self.folder, folder)
                inner = self.beside(folders, pipes)
                inner.folder = folder
                inside = str(folder_inside(request.cwd, self.workdir))
                argv = ("/bin/sh", "-c", 'cd -- "$0" && exec "$@"', inside, *request.argv)
                launch = Command(argv, env=OWN_CONFIGURATION)
                end = await inner.run(launch, limits, max(0.0, deadline - time.monotonic()))
                if work:
                    async with one_at_a_time:
                        await in_thread(work.after)
                return sandbox.end_of(end)
            except Unreadable as error:
                failures.append(error)
                raise
            finally:
                await in_thread(remove, folders.root)

        try:
            sandbox = CodeSandbox(helper, self.interpreter, run, deadline, removed)
            async with sandbox:
                yield sandbox
            if failures:
                raise failures[0]
        finally:
            await in_thread(remove, root)

    def beside(self, folders: Folders, pipes: Pipes) -> Workspace:
        """A workspace in its own sandbox, for one command with these `pipes`."""
        raise NotImplementedError

    async def clear_home(self) -> None:
        await in_thread(self._folders.clear_home)

    async def close(self) -> None:
        """Removes everything, including folders that the agent made unwritable."""
        if self._output is not None:
            self._output.close()  # no disk is unmounted with an open file
            self._output = None
        await in_thread(_remove, self._folders.root)


def copy_tree(source: Path, target: Path) -> None:
    """Copies all in `source` to the folder `target`. Raises `Unreadable` if that fails."""
    command = ["cp", "-a", "--reflink=auto", "--", f"{source}/.", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        raise Unreadable(f"the working copy can't be copied: {result.stderr.strip()[:300]}")


def _make_code_folders(root: Path) -> Folders:
    folders = Folders(Path(tempfile.mkdtemp(prefix="run-", dir=root)))
    folders.home.mkdir(mode=0o700)
    folders.tmp.mkdir(mode=0o700)
    return folders


def empty_folder(path: Path) -> None:
    """Replaces `path` by an empty folder. A link is removed, not followed."""
    remove(path)
    path.mkdir(mode=0o700, exist_ok=True)


async def make_folders(base: Path | None, source: Source, *, own_disk: bool = False) -> Folders:
    """New folders below `base` (default: the system's temporary folder), `work` filled by `source`.

    With `own_disk` they are on a file system of their own where the machine can mount one (`disk.py`).
    """
    return await in_thread(_make, base, source, own_disk)


def _make(base: Path | None, source: Source, own_disk: bool) -> Folders:
    if base is not None:
        base.mkdir(parents=True, exist_ok=True)
    folders = Folders(Path(tempfile.mkdtemp(prefix="rollout-", dir=base)))
    try:
        if own_disk and disks_work(folders.root.parent):
            mount_disk(folders.root)
        for path in (folders.work, folders.home, folders.tmp):
            path.mkdir(mode=0o700)
        if isinstance(source, GitCommit) and overlay_works(folders.root.parent):
            mount(source.base(), folders.root)
        else:
            source(folders.work)
    except RolltapError:
        _remove(folders.root)
        raise
    except Exception as error:  # the boundary to a task's own set-up, which may raise anything
        _remove(folders.root)
        raise RuntimeFailed(f"can't prepare the working copy: {type(error).__name__}: {error}") from error
    return folders


def _remove(root: Path) -> None:
    unmount(root)
    unmount_disk(root)
    remove(root)


SYSTEM = tuple(map(PurePosixPath, ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/opt")))
"""What a link of the working copy may lead to besides the working copy: every sandbox shows it alike."""
MOST_ENTRIES = 2_000_000
DEEPEST = 500
LISTS = stat.S_IRUSR | stat.S_IXUSR
MOST_LINKS = 40
"""Linux follows no more of them on one path."""
NAMED = 100


def remove_all_traps(places: Mapping[Path, Path], system: Sequence[PurePosixPath] = SYSTEM) -> list[str]:
    """`remove_traps` in all `places` of a workspace: links between them stay."""
    system = (*system, *map(PurePosixPath, places))
    return [each for place, part in places.items() for each in remove_traps(LeftFiles(part), place, system)]


def remove_traps(left: LeftFiles, workdir: os.PathLike[str], system: Sequence[PurePosixPath] = SYSTEM) -> list[str]:
    """Removes links that lead neither into the working copy, seen at `workdir`, nor into the `system`, and pipes,
    sockets and devices.

    Returns what was removed, by path, `NAMED` at most. The working copy may change meanwhile: nothing is reached by a
    link. Raises `Unreadable` if one may be left: if there are more or deeper entries than are looked at, a file system
    is mounted there, or something can't be listed or removed.
    """
    if mounted := mounts_below(left.root):
        raise Unreadable(f"something is mounted at {mounted[0]}")
    removed, count = [], 0
    with closing(_odd_entries(left)) as entries:
        for path, status in entries:
            target = ""
            with suppress(OSError):  # what is gone meanwhile leads nowhere
                target = left.link(path) if stat.S_ISLNK(status.st_mode) else ""
            if not target or not _stays(target, path, (PurePosixPath(workdir), *system)):
                _unlink(left, path)
                count += 1
                if count <= NAMED:
                    removed.append(f"{path[1:]} -> {target}" if target else path[1:])
    return sorted(removed) + [f"and {count - NAMED:,} more"] * (count > NAMED)


def remove_links_to(left: LeftFiles, workdir: os.PathLike[str], path: str) -> list[str]:
    """Removes the links by which a program that works at `workdir` would write to `path`, and returns them: where it
    writes something else to a name of the agent's choice. Raises `Unreadable` as `remove_traps` does."""
    links = dict[str, str]()
    for each, status in _odd_entries(left):
        with suppress(OSError):
            if stat.S_ISLNK(status.st_mode):
                links[each[1:]] = left.link(each)
    aliases = [each for each in sorted(links) if _leads_to(each, links, PurePosixPath(workdir)) == path]
    for each in aliases:
        _unlink(left, each)
    return aliases


def _unlink(left: LeftFiles, path: str) -> None:
    """Removes a link or the like, also from a folder without the right to do so. Raises `Unreadable` if it stays."""
    try:
        try:
            left.unlink(path)
        except PermissionError:
            left.allow(path.rpartition("/")[0])
            left.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Unreadable(f"{path.lstrip('/')} can't be removed: {error.strerror}") from error


def _odd_entries(left: LeftFiles) -> Generator[tuple[str, os.stat_result], None, None]:
    """What is neither a file nor a folder, by its path, which begins with `/`.

    A folder that this process may not list gets that right: who knows a name in it could still use it.
    """
    looked_at, waiting, closed = 0, [""], {""}
    while waiting:
        folder = waiting.pop()
        if folder in closed:
            try:
                left.allow(folder)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise Unreadable(f"{folder[1:] or 'the working copy'} can't be listed: {error.strerror}") from error
        with closing(left.entries(folder)) as entries:
            for path, status in entries:
                looked_at += 1
                if looked_at > MOST_ENTRIES:
                    raise Unreadable(f"the working copy has more than {MOST_ENTRIES:,} files")
                if not stat.S_ISDIR(status.st_mode):
                    if not stat.S_ISREG(status.st_mode):
                        yield path, status
                    continue
                if path.count("/") >= DEEPEST:
                    raise Unreadable(f"the working copy has folders more than {DEEPEST} deep")
                waiting.append(path)
                if status.st_mode & LISTS != LISTS:
                    closed.add(path)


def _leads_to(path: str, links: Mapping[str, str], workdir: PurePosixPath) -> str:
    """Where `path` leads by the links of a working copy, relative to it; "" for outside and for circles."""
    here, rest, steps = PurePosixPath(), [*reversed(PurePosixPath(path).parts)], 0
    while rest:
        part = rest.pop()
        if part == "..":
            here = here.parent
            continue
        here /= part
        target = links.get(str(here))
        if target is None:
            continue
        steps += 1
        inside = PurePosixPath(target)
        if target.startswith("/"):
            if not inside.is_relative_to(workdir):
                return ""
            here, inside = PurePosixPath(), inside.relative_to(workdir)
        else:
            here = here.parent
        if steps > MOST_LINKS:
            return ""
        rest += reversed(inside.parts)
    return str(here)


def _stays(target: str, path: str, folders: Sequence[PurePosixPath]) -> bool:
    """Whether the link `path` leads into the working copy or these folders, wherever other links of theirs lead.

    After a name, `..` leaves the folder that the name leads to, which may be anywhere.
    """
    parts = PurePosixPath(target).parts
    ups = 0
    while ups < len(parts) and parts[ups] == "..":
        ups += 1
    if ".." in parts[ups:]:
        return False
    if not target.startswith("/"):
        return ups <= path.count("/") - 1
    return any(PurePosixPath(target).is_relative_to(folder) for folder in folders)
