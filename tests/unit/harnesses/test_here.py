"""A harness that is started with its own approvals off is not let loose on a person's machine unasked."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from pathlib import Path

import pytest

from rolltap.errors import RuntimeFailed
from rolltap.harnesses.agents.install import Installation
from rolltap.harnesses.agents.registry import HARNESSES, get_harness
from rolltap.harnesses.base import Command, Ending, Harness, Limits
from rolltap.harnesses.runtimes import bubblewrap, shown
from rolltap.harnesses.runtimes.bubblewrap import INTERPRETER, BubblewrapRuntime
from rolltap.harnesses.runtimes.here import CurrentFolderRuntime, acts_unasked, runtime_here
from rolltap.harnesses.runtimes.shown import Mount, mounts_of, private_paths, remove_places
from rolltap.harnesses.runtimes.sources import Empty, Files

RUNS_AS_THE_PERSON_DOES = {"command", "mini-swe-agent-inprocess"}


def installed(harness: Harness) -> Installation:
    assert harness.package is not None
    return Installation(harness.package, (), (), {}, 0.0)


@pytest.mark.parametrize("name", sorted(HARNESSES.keys() - RUNS_AS_THE_PERSON_DOES))
def test_every_harness_runs_in_the_sandbox_as_nobody_answers_it(name: str) -> None:
    harness = get_harness(name)
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=False)
    assert runtime.sandbox is not None
    assert "in a sandbox" in notice
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=True)
    assert runtime.sandbox is None
    assert "it may do whatever you can" in notice


@pytest.mark.parametrize(("switch", "sandboxed"), [("--yolo", True), ("--careful", False)])
def test_a_persons_own_command_is_sandboxed_if_it_says_that_it_acts_unasked(switch: str, sandboxed: bool) -> None:
    harness = get_harness("command", argv=("agent", switch))
    assert (runtime_here(harness, None, unsandboxed=False)[0].sandbox is not None) is sandboxed
    assert bool(acts_unasked(harness)) is sandboxed


def test_what_is_not_installed_is_named_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, unsandboxed in (("mini-swe-agent", False), ("codex", True)):
        with pytest.raises(RuntimeFailed, match=f"rolltap harness install {name}"):
            runtime_here(get_harness(name), None, unsandboxed=unsandboxed)
    runtime_here(get_harness("command", argv=("sh",)), None, unsandboxed=False)


def test_without_git_a_folder_is_shown_unless_it_is_a_repository(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.setenv("PATH", "")
    assert mounts_of(tmp_path / "inner")
    (tmp_path / ".git").mkdir()
    with pytest.raises(RuntimeFailed, match="git is not installed"):
        mounts_of(tmp_path / "inner")


async def test_it_sees_this_folder_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    monkeypatch.chdir(here)
    harness = get_harness("codex")
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=False)
    workspace = await runtime.prepare(Empty())
    try:
        exit_ = await workspace.run(
            Command(("bash", "-c", f"echo new > made; test ! -e {other} && echo apart")), Limits(), 20
        )
    finally:
        await workspace.close()
    assert (exit_.ending, exit_.output.strip()) == (Ending.DONE, "apart")
    assert (here / "made").read_text() == "new\n"
    assert "sandbox" in notice


def test_outside_the_sandbox_it_runs_when_that_was_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    harness = get_harness("codex")
    runtime, notice = runtime_here(harness, installed(harness), unsandboxed=True)
    assert runtime.name == "here"
    assert "--dangerously-bypass-approvals-and-sandbox" in notice
    with pytest.raises(RuntimeFailed, match="harness install codex"):
        runtime_here(harness, None, unsandboxed=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    bubblewrap.refusal.cache_clear()
    try:
        with pytest.raises(RuntimeFailed, match="--no-sandbox"):
            runtime_here(harness, installed(harness), unsandboxed=False)
    finally:
        bubblewrap.refusal.cache_clear()


ATTACK = """\
import os, pathlib, shutil, subprocess
here, done = pathlib.Path(), []
for name in PLACES:
    path = here / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("evil")
        done.append(f"wrote {name}")
    except OSError:
        pass
    try:
        os.replace(path, here / "away")
        done.append(f"moved {name}")
    except OSError:
        pass
    for outer in path.parents[:-1]:
        try:
            os.rename(outer, here / "moved")
            path.parent.mkdir(parents=True)
            path.write_text("evil")
            done.append(f"moved {outer} for {name}")
        except OSError:
            pass
    try:
        os.symlink("/tmp", path)
        done.append(f"linked {name}")
    except OSError:
        pass
print(done)
(here / "made").write_text("new")
if (here / ".git/HEAD").exists():
    subprocess.run("git add made && git -c user.name=a -c user.email=a@b commit -qm made", shell=True, check=True)
"""
EXECUTE = (
    *(".git/config", ".git/hooks/pre-commit", ".git/config.worktree", ".git/commondir", "inner/.git/config"),
    *("inner/.git/hooks/post-checkout", "rolltap.toml", ".vscode/tasks.json", ".idea/workspace.xml", ".envrc"),
    *(".npmrc", ".bashrc", ".cargo/config.toml", ".claude/settings.json", ".husky/pre-commit", ".yarnrc.yml"),
    *("gptme.toml", "gptme.local.toml", "opencode.jsonc", ".github/hooks/x.json", ".config/mise/config.toml"),
    *(".config/mise.toml", ".Rprofile", ".iex.exs", ".ghci", "rolltap-data/keys.toml"),
)
IF_THERE = ("rust-toolchain.toml", "rust-toolchain", "uv.toml")


def _is_repository(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _git(folder, "init", "-q", ".")


def _git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True)


CONFIGURED = {
    "hooks": ("core.hooksPath", "{0}", "{0}/pre-commit"),
    "an included file": ("include.path", "{1}/{0}", "{0}"),
    "an included file, sometimes": ("includeIf.gitdir:**.path", "{1}/{0}", "{0}"),
    "a filter": ("filter.x.clean", "'./{0}' %f", "{0}"),
    "an alias": ("alias.check", "!sh -e '{0}' | cat", "{0}"),
    "a watcher": ("core.fsmonitor", "{0}", "{0}"),
    "a command": ("diff.x.command", "python3 '{0}' --all", "{0}"),
}
"""A setting of git, its value for a place of the working copy (and the way there from `.git`), and what git runs."""


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("name", CONFIGURED)
async def test_an_agent_writes_nowhere_where_a_persons_git_is_told_to_look(
    name: str, is_there: bool, tmp_path: Path
) -> None:
    setting, value, program = CONFIGURED[name]
    here = tmp_path / "here"
    place = random.choice(["tools", "tools/git hooks", "a/b/c", ".dev/git", "x.sh"])
    tree = here / random.choice(["", "inner"])
    _is_repository(here)
    _is_repository(tree)
    _git(tree, "config", setting, value.format(place, ".."))
    if is_there or name != "hooks":
        file = tree / program.format(place)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine" if name.startswith(("hooks", "a ")) else "[alias]\n\tx = y\n")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    workspace = await CurrentFolderRuntime(here, (), BubblewrapRuntime(tmp_path / "places")).prepare(Empty())
    script = ATTACK.replace("PLACES", repr([str(tree.relative_to(here) / program.format(place))]))
    try:
        exit_ = await workspace.run(Command((INTERPRETER, "-c", script)), Limits(), 30)
    finally:
        await workspace.close()
    assert "[]" in exit_.output.splitlines(), (place, exit_.output)
    assert {path: path.read_bytes() for path in before if ".git/index" not in str(path)}.items() <= before.items()
    assert not list(here.rglob("pre-commit")) or is_there


async def test_what_lies_beside_places_that_execute_is_the_agents(tmp_path: Path) -> None:
    """And a file in the place of a folder around them is no hindrance."""
    here = tmp_path / "here"
    Files({".config": "CONFIG_X=y\n"})(here)
    workspace = await CurrentFolderRuntime(here, (), BubblewrapRuntime(tmp_path / "places")).prepare(Empty())
    writes = "mkdir .github/workflows; echo on > .github/workflows/ci.yml; cat .config; touch rust-toolchain.toml"
    try:
        exit_ = await workspace.run(Command(("bash", "-c", writes)), Limits(), 30)
    finally:
        await workspace.close()
    assert (exit_.ending, exit_.output) == (Ending.DONE, "CONFIG_X=y\n")
    left = sorted(str(path.relative_to(here)) for path in here.rglob("*") if path.is_file())
    assert left == [".config", ".github/workflows/ci.yml", "rust-toolchain.toml"]
    assert not (here / ".github/hooks").exists()


def test_pipes_that_an_agent_left_keep_no_later_run_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.toml", "keys.toml", "store", "inner/y.toml", "inner/deep/keys.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "store.lock").touch()
    _is_repository(tmp_path / "its")
    failures: list[str] = []

    def look() -> None:
        assert private_paths(tmp_path) == []
        assert mounts_of(tmp_path)
        with (tmp_path / "its/.git/config").open("a") as file:
            file.write(f"[include]\n\tpath = {tmp_path / 'x.toml'}\n")
        monkeypatch.setattr(shown, "GIT_S", 0.3)
        try:
            mounts_of(tmp_path)
        except RuntimeFailed as error:
            failures.append(error.message)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(20)
    assert not looking.is_alive()
    assert ["git does not read" in failure for failure in failures] == [True]


@pytest.mark.parametrize("state", ["empty", "a repository", "all there"])
async def test_an_agent_writes_nowhere_where_a_persons_tools_run_programs(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    if state != "empty":
        _is_repository(here)
        _is_repository(here / "inner")
    places = [place for place in EXECUTE if state != "empty" or not place.startswith("inner")]
    if state == "all there":
        places += IF_THERE
        for place in places:
            if not (here / place).exists() and "commondir" not in place:
                (here / place).parent.mkdir(parents=True, exist_ok=True)
                (here / place).write_text("mine")
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    folders = {path for path in here.rglob("*") if path.is_dir()}
    monkeypatch.chdir(here)
    harness = get_harness("codex")
    runtime, _ = runtime_here(harness, installed(harness), unsandboxed=False)
    workspace = await runtime.prepare(Empty())
    script = ATTACK.replace("PLACES", repr(places))
    try:
        exit_ = await workspace.run(Command((INTERPRETER, "-c", script)), Limits(), 30)
    finally:
        await workspace.close()
    assert exit_.ending is Ending.DONE, exit_.output
    assert "['wrote .claude/settings.json']" in exit_.output.splitlines()  # in a copy, which is thrown away
    assert (here / "made").exists()
    for path in before:
        assert ".git/index" in str(path) or path.read_bytes() == before[path]
    left = (
        {path for path in here.rglob("*") if path.name != "made" and ".git/" not in str(path)} - set(before) - folders
    )
    assert left == set()


def test_nothing_is_removed_behind_a_link_that_an_agent_left(tmp_path: Path) -> None:
    """Where bwrap made empty places to mount something at, they are removed after the run."""
    others, work = tmp_path / "others", tmp_path / "work"
    places = [Mount(Path(".git/hooks"), is_folder=True, is_there=False), Mount(Path(".git/config"), is_there=False)]
    for folder in (others, work / ".git"):
        (folder / "hooks").mkdir(parents=True)
        (folder / "config").touch()
    remove_places(work, places)
    assert list((work / ".git").iterdir()) == []
    (work / ".git").rmdir()
    (work / ".git").symlink_to(others)
    remove_places(work, places)
    assert sorted(path.name for path in others.iterdir()) == ["config", "hooks"]
