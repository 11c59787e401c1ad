"""Which files of this machine a sandbox shows, and which of them are read-only.

rolltap's own files are never shown: they hold keys and other sessions. A data folder is called `rolltap-data`, or has
the planes' keys in `keys.toml`. A settings file of any name may have keys of planes, engines and vendors. A store may
be outside the data folder, with its lock beside it. For an interpreter, the folders that it runs and imports from are
shown.

In a person's folder an agent can't write to places from which the person's own tools run programs. Git runs hooks and
programs that its configuration names; editors, shells, package managers, version managers and other agents run programs
that their settings name. A place that does not exist yet is mounted as an empty, read-only one while the agent runs,
and removed afterwards: bubblewrap can cover a name but not forbid it, and removing the agent's files at the end would
be too late for a shell that reads them during the run. So a listing shows the agent empty places that the person does
not have. The folders of agents are copies that are discarded: agents write to them at their start, and exit if they
can't.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.left_files import LeftFiles
from rolltap.settings import DATA

SKIPPED = {".git", "node_modules", "__pycache__"}
KEYS = re.compile(rb"^(admin|trainer|secret)\s*=", re.M)
SETTINGS = re.compile(rb"^\[(keys|engines\.|policies\.)", re.M)
STORE = b"SQLite format 3\0"
BESIDE_STORE = ("", "-wal", "-shm", ".index", ".lock")


PERSONAL = (
    *(".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".git-credentials", ".pgpass", ".pypirc"),
    *(".password-store", ".mozilla", ".bash_history", ".zsh_history", ".python_history", "keys.toml"),
)
"""Names in a folder that hold a person's keys, or show that it is somebody's HOME."""


def check_shown(path: Path) -> None:
    """Raises `RuntimeFailed` if a sandbox can't show the file or folder `path`: HOME, a folder around it, or keys."""
    real = path.resolve()
    if real.is_file():
        return
    homes = {Path.home().resolve(), Path(pwd.getpwuid(os.getuid()).pw_dir).resolve()}
    around = next((home for home in homes if home.is_relative_to(real)), None)
    if around is not None:
        raise RuntimeFailed(
            f"a sandbox can't show {path}: {around} is in it; install what needs it in a folder of its own"
        )
    if private := next((name for name in PERSONAL if os.path.lexists(real / name)), None):
        raise RuntimeFailed(f"a sandbox can't show {path}: it holds {private}; install what needs it elsewhere")


def private_paths(folder: Path) -> list[Path]:
    """The private files and data folders in `folder`, relative to it. Links are not followed.

    Raises `RuntimeFailed` if `folder` is itself a data folder.
    """
    paths = [path.relative_to(folder) for path in _private(folder)]
    if Path() in paths:
        raise RuntimeFailed(f"{folder} is rolltap's data folder: run the agent elsewhere, as it would see all keys")
    return paths


def _private(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        parent = Path(here)
        if parent.name == DATA or ("keys.toml" in files and KEYS.search(_beginning(parent / "keys.toml"))):
            folders.clear()
            yield parent
            continue
        folders[:] = [name for name in folders if name not in SKIPPED]
        for name in files:
            if name == "rolltap.toml" or (name.endswith(".toml") and SETTINGS.search(_beginning(parent / name))):
                yield parent / name
            store = parent / name.removesuffix(".lock")
            if name.endswith(".lock") and _beginning(store).startswith(STORE):
                beside = (store.with_name(store.name + suffix) for suffix in BESIDE_STORE)
                yield from (path for path in beside if path.is_file())


def _beginning(path: Path) -> bytes:
    """The beginning of a file; nothing of a pipe, which an agent may have left, as nobody writes into it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(65_536) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return b""


PRINT_FOLDERS = """\
import json, os, sys
print(json.dumps([*sys.path[1:], sys.executable, os.path.realpath(sys.executable), sys.prefix, sys.base_prefix]))
"""
"""Prints, as JSON, the programs of an interpreter and the folders that it imports from."""

PREFIX = "lib/python3*/os.py"
"""In an interpreter's own folder."""


@cache
def python_folders(python: str) -> tuple[Path, ...]:
    """The programs and folders outside `/usr` that an interpreter runs and imports from, as in a sandbox.

    Raises `RuntimeFailed` if it can't run, or if one of them holds what a sandbox must not show.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, "-s", "-c", PRINT_FOLDERS]
    try:
        listing = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise RuntimeFailed(f"can't run the Python {python}: {error}") from error
    folders = {Path(path) for path in json.loads(listing) if Path(path).exists()}
    outside = {folder for folder in folders if not folder.is_relative_to("/usr")}
    nested = {folder for folder in outside if any(folder.is_relative_to(other) for other in outside - {folder})}
    for folder in outside - nested:
        check_shown(folder)
        if not any(
            (around / "pyvenv.cfg").is_file() or list(around.glob(PREFIX)) for around in (folder, *folder.parents)
        ):
            check_without_keys(folder)
    return tuple(sorted(outside - nested))


def check_without_keys(folder: Path) -> None:
    """Raises `RuntimeFailed` for a folder with rolltap's files: a project that is installed in place, for example."""
    if private := private_paths(folder):
        raise RuntimeFailed(f"a sandbox can't show {folder}, which holds {private[0]}: install it, not in place")


FOLDERS = (
    *(
        ".vscode",
        ".idea",
        ".fleet",
        ".zed",
        ".cursor",
        ".windsurf",
        ".devcontainer",
        ".vim",
        ".nvim",
        ".helix",
        ".settings",
    ),
    *(".husky", ".githooks", ".direnv", ".mise", ".config/mise", ".yarn", ".cargo", ".bundle", ".gradle", ".mvn"),
    ".github/hooks",
)
AGENTS = (
    *(".claude", ".codex", ".gemini", ".qwen", ".opencode", ".pi", ".aider", ".continue", ".vibe", ".openhands"),
    *(".cline", ".clinerules", ".gptme", ".hermes", ".crush", ".factory", ".grok", ".kiro", ".amazonq", ".roo"),
)
FILES = (
    *("rolltap.toml", ".mcp.json", "opencode.json", "opencode.jsonc", "gptme.toml", "gptme.local.toml", ".crush.json"),
    *("crush.json", ".aider.conf.yml", ".vimrc", ".lvimrc", ".exrc", ".nvimrc", ".nvim.lua", ".dir-locals-2.el"),
    *(".ghci", ".iex.exs", ".ocamlinit", ".octaverc", ".Rprofile", ".Renviron", ".bazelrc", ".bazeliskrc"),
    *(".dir-locals.el", ".sublime-project", ".envrc", ".autoenv", ".bashrc", ".bash_profile", ".bash_login"),
    *(".bash_logout", ".profile", ".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".inputrc"),
    *(
        ".tool-versions",
        ".mise.toml",
        "mise.toml",
        "mise.local.toml",
        ".mise.local.toml",
        ".config/mise.toml",
        ".prototools",
        ".npmrc",
        ".yarnrc",
        ".yarnrc.yml",
        ".pnpmfile.cjs",
    ),
    *("bunfig.toml", ".bunfig.toml", ".pypirc", "pip.conf", ".condarc", ".gemrc", ".irbrc", ".pryrc", ".pdbrc"),
    *(".gitconfig", ".gdbinit", ".lldbinit", ".pre-commit-config.yaml", ".lefthook.yml", "lefthook.yml"),
)
FILES_THERE = ("rust-toolchain", "rust-toolchain.toml", "uv.toml")
"""Only if the person has them: an empty one would change what the tool does."""
GIT_FILES = ("config", "config.worktree")
GIT_FOLDERS = ("hooks",)
COMMON = "commondir"
"""A file of a repository's folder that names another folder, whose configuration git then reads."""
COMMON_HERE = ".\n"
MOST_FOLDERS = 50_000
GIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount in the sandbox: `path` of the working copy, as it is (`writable` or not), or an empty one in its place.

    `is_copy`: a writable copy of it, which is thrown away.
    `text`: the content of a file that stands there instead of an empty one.
    """

    path: Path
    writable: bool = False
    is_folder: bool = False
    is_there: bool = True
    text: str = ""
    is_copy: bool = False


def mounts_of(folder: Path) -> list[Mount]:
    """The mounts that keep an agent from writing where a person's tools run programs, outer ones first."""
    there = [name for name in FILES_THERE if (folder / name).exists()]
    mounts = [replace(_mount(folder, name, is_folder=True), is_copy=True) for name in AGENTS]
    for names, is_folder in ((FOLDERS, True), ((*FILES, *there), False)):
        for name in names:
            around = [_mount(folder, outer, is_folder=True, writable=True) for outer in _outer(name)]
            if all(each.is_folder for each in around):  # a kernel's `.config` is a file
                mounts += [*around, _mount(folder, name, is_folder=is_folder)]
    if not os.path.lexists(folder / DATA):  # else it is hidden: a server that starts here would take an agent's keys
        mounts.append(_mount(folder, DATA, is_folder=True))
    repositories = [Path(".git"), *_inner_repositories(folder)]
    for repository in repositories:
        for outer in reversed(repository.parents[:-1]):  # they can't be renamed, and others be put in their place
            mounts.append(Mount(outer, writable=True, is_folder=True))
        mounts += _git_mounts(folder, repository)
    closed = {mount.path for mount in mounts if not mount.writable}
    for path in dict.fromkeys(path for repository in repositories for path in _named_by_git(folder, repository)):
        if ".git" in path.parts or not closed.isdisjoint((path, *path.parents)):
            continue
        mounts += [Mount(outer, writable=True, is_folder=True) for outer in reversed(path.parents[:-1])]
        mounts.append(_mount(folder, path, is_folder=True))
    return list(dict.fromkeys(mounts))


def _named_by_git(folder: Path, repository: Path) -> Iterator[Path]:
    """Places of the person's folder, outside `.git`, from which git runs programs in a repository: its folder of hooks,
    files of configuration that it includes, and programs that a setting names. Of a folder of hooks that is not there
    the first part that is missing. Raises `RuntimeFailed` if a repository is here, but no git, which says so, or if it
    does not say so in time: an agent's repository may include a pipe."""
    tree = (folder / repository).parent
    if shutil.which("git") is None:
        if not any((outer / ".git").exists() for outer in (tree, *tree.parents)):
            return
        raise RuntimeFailed(f"git is not installed: it says which files of the repository {tree} it would run")
    command = ["git", "-C", str(tree), "config", "--list", "--includes", "--show-origin", "-z"]
    try:
        listing = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=GIT_S, check=False
        ).stdout
    except subprocess.TimeoutExpired:
        raise RuntimeFailed(f"git does not read the configuration of the repository {tree}: look at it") from None
    fields = listing.split("\0")
    for origin, setting in zip(fields[::2], fields[1::2], strict=False):
        name, _, value = setting.partition("\n")
        try:
            words = [value, *shlex.split(value.removeprefix("!"))]
        except ValueError:
            words = [value]
        for word in (origin.removeprefix("file:"), *words):
            path = Path(os.path.normpath(tree / os.path.expanduser(word)))
            if not word or "\n" in word or not path.is_relative_to(folder) or path == folder:
                continue
            if name == "core.hookspath" and word == value:
                missing = [each for each in (path, *path.parents) if each.is_relative_to(folder) and not each.exists()]
                yield (missing[-1] if missing else path).relative_to(folder)
            elif path.is_file():
                yield path.relative_to(folder)


def _outer(name: str) -> list[Path]:
    """The folders around a place, outer ones first: mounted, they can't be renamed, and others be put there."""
    return list(reversed(Path(name).parents[:-1]))


def _mount(folder: Path, name: str | Path, *, is_folder: bool, writable: bool = False) -> Mount:
    path = folder / name
    is_there = path.exists()
    return Mount(Path(name), writable, path.is_dir() if is_there else is_folder, is_there)


def _git_mounts(folder: Path, repository: Path) -> Iterator[Mount]:
    if not (folder / repository).is_dir():
        yield _mount(folder, repository, is_folder=True)
        return
    yield Mount(repository, writable=True, is_folder=True)
    yield from _git_folder(folder, repository)
    for kind in ("modules", "worktrees"):
        for here, folders, files in os.walk(folder / repository / kind):
            folders[:] = [name for name in folders if name not in ("objects", "refs", "logs", "hooks")]
            if "HEAD" in files:
                inner = Path(here).relative_to(folder)
                for outer in reversed(inner.relative_to(repository).parents[:-1]):
                    yield Mount(repository / outer, writable=True, is_folder=True)
                yield Mount(inner, writable=True, is_folder=True)
                yield from _git_folder(folder, inner, has_common=kind == "modules")


def _git_folder(folder: Path, place: Path, *, has_common: bool = True) -> Iterator[Mount]:
    for name in GIT_FILES:
        yield _mount(folder, place / name, is_folder=False)
    for name in GIT_FOLDERS:
        yield _mount(folder, place / name, is_folder=True)
    common = _mount(folder, place / COMMON, is_folder=False)
    yield common if common.is_there or not has_common else Mount(common.path, is_there=False, text=COMMON_HERE)


def _inner_repositories(folder: Path) -> list[Path]:
    found = []
    for here, folders, files in islice(os.walk(folder), MOST_FOLDERS):
        if here != str(folder) and (".git" in folders or ".git" in files):
            found.append(Path(here).relative_to(folder) / ".git")
        folders[:] = [name for name in folders if name not in SKIPPED]
    return found


def bind_options(folder: Path, inside: Path, mounts: Sequence[Mount], stand_ins: Path) -> list[str]:
    """bwrap's options for the mounts of `folder`, which is mounted at `inside`. `stand_ins` gets files of ours."""
    options: list[str] = []
    for mount in mounts:
        place = str(inside / mount.path)
        if mount.writable and not mount.is_there:
            (folder / mount.path).mkdir()
            options += ["--bind", str(folder / mount.path), place]
        elif mount.is_copy and mount.is_folder:
            options += ["--bind", str(_copy(folder / mount.path, stand_ins)), place]
        elif mount.is_there:
            options += ["--bind" if mount.writable else "--ro-bind", str(folder / mount.path), place]
        elif mount.is_folder:
            options += ["--tmpfs", place, "--remount-ro", place]
        elif mount.text:
            stand_in = stand_ins / mount.path.name
            stand_in.write_text(mount.text, encoding="utf-8")
            options += ["--ro-bind", str(stand_in), place]
        else:
            options += ["--ro-bind", "/dev/null", place]
    return options


def _copy(path: Path, stand_ins: Path) -> Path:
    """A copy of a folder, or an empty one where there is none."""
    copy = Path(tempfile.mkdtemp(prefix=path.name, dir=stand_ins))
    if path.is_dir():
        shutil.copytree(path, copy, symlinks=True, dirs_exist_ok=True, ignore=_odd_kinds)
    return copy


def _odd_kinds(folder: str, names: list[str]) -> list[str]:
    """What can't be copied: pipes, sockets and devices."""
    paths = {name: os.path.join(folder, name) for name in names}
    return [
        name
        for name, path in paths.items()
        if not (os.path.islink(path) or os.path.isfile(path) or os.path.isdir(path))
    ]


def remove_places(folder: Path, mounts: Sequence[Mount]) -> None:
    """Removes the empty files and folders that bwrap made to mount something there. A link that the agent put in the
    place of a folder on the way leads to others' files."""
    left = LeftFiles(folder)
    for mount in reversed(mounts):
        if not mount.is_there:
            with suppress(OSError):
                left.remove_empty(str(mount.path))
