"""An evaluation that ran past its time may still copy an agent's files while their folders are removed."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from threading import Thread

import pytest

from rolltap.harnesses.left_files import Change, ChangeKind, Unreadable, apply_changes, remove


def added(folder: Path, count: int) -> list[Change]:
    """Changes that add `count` files, in folders of any depth; the files are in `folder`."""
    names = ["/".join([*random.choices("abc", k=random.randrange(6)), f"{number}.py"]) for number in range(count)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x = 1\n")
    return [Change(name, ChangeKind.ADDED) for name in names]


@pytest.mark.parametrize("when", [0, 1, 20, 39])
def test_work_that_goes_on_brings_no_removed_folder_back(when: int, tmp_path: Path) -> None:
    agents, root, asked = tmp_path / "agents", tmp_path / "rollout", 0
    changed = added(agents, 40)
    (root / "work").mkdir(parents=True)

    def brings(path: str, is_link: bool) -> bool:
        nonlocal asked
        asked += 1
        if asked == when + 1:
            remove(root)
        return True

    with pytest.raises(Unreadable):
        apply_changes(changed, agents, root / "work", brings)
    assert [path.name for path in tmp_path.iterdir()] == ["agents"]


def test_a_folder_is_removed_while_files_come_in(tmp_path: Path) -> None:
    agents = tmp_path / "agents"
    changed = added(agents, 3000)
    for number in range(6):
        root = tmp_path / f"rollout{number}"
        (root / "work").mkdir(parents=True)

        def work(target: Path = root / "work") -> None:
            with pytest.raises(Unreadable):
                apply_changes(changed * 20, agents, target)

        thread = Thread(target=work)
        thread.start()
        while not any((root / "work").iterdir()):
            pass
        remove(root)
        thread.join()
        assert [path.name for path in tmp_path.iterdir()] == ["agents"], number


@pytest.mark.parametrize("flag", ["+i", "+a"])
def test_what_can_not_be_changed_is_removed(flag: str, tmp_path: Path) -> None:
    """Files and folders, at random and in a path that is too long for a call, of an agent that root runs."""
    (root := tmp_path / "-rollout").mkdir()
    if subprocess.run(["chattr", flag, root], capture_output=True, check=False).returncode:
        pytest.skip("needs root, and a file system with such flags")
    subprocess.run(["chattr", "-ia", root], check=True)
    folders = [os.open(root, os.O_RDONLY)]
    for depth in range(60):
        os.mkdir(name := f"{depth}-{'x' * 90}", dir_fd=folders[-1])
        folders.append(os.open(name, os.O_RDONLY, dir_fd=folders[-1]))
        os.close(os.open("-file\n*", os.O_CREAT, dir_fd=folders[-1]))
    for folder in reversed(folders[1:]):
        kept = [".", "-file\n*"] if folder == folders[-1] else random.sample([".", "-file\n*"], random.randrange(3))
        for each in kept:
            subprocess.run(["chattr", flag, f"/proc/{os.getpid()}/fd/{folder}/{each}"], check=True)
        os.close(folder)
    remove(root)
    assert list(tmp_path.iterdir()) == []
