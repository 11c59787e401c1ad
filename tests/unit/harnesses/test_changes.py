"""What an agent changed, and what of it an evaluator takes over."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rolltap.harnesses.evaluators.intake import Intake, StartingState
from rolltap.harnesses.left_files import Change, ChangeKind, apply_changes, changes

NAMES = st.sampled_from(["a.py", "b.py", "src/a.py", "src/deep/c.txt", "tests/test_a.py", "conftest.py", "x.pth"])
TREES = st.dictionaries(NAMES, st.text("ab\n", max_size=5), max_size=7)


def write(root: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def read(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


@given(before=TREES, after=TREES)
def test_carrying_changes_makes_the_trees_equal_but_for_tests_and_documents(
    tmp_path_factory, before: dict[str, str], after: dict[str, str]
) -> None:
    root = tmp_path_factory.mktemp("trees")
    (root / "agent").mkdir()
    (root / "fresh").mkdir()
    agent, fresh = write(root / "agent", after), write(root / "fresh", before)
    intake = Intake(StartingState.of(fresh))
    dropped = apply_changes(changes(fresh, agent), agent, fresh, intake.brings_of(agent))
    stays = {"tests/test_a.py", "conftest.py", "x.pth"} | ({"src/deep/c.txt"} & before.keys())
    expected = {name: text for name, text in after.items() if name not in stays}
    expected |= {name: text for name, text in before.items() if name in stays}
    assert read(fresh) == expected
    assert {change.path for change in dropped} == {n for n in stays if before.get(n) != after.get(n)}


def test_links_are_carried_as_links_and_never_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("original")
    agent, fresh = tmp_path / "agent", tmp_path / "fresh"
    for root in (agent, fresh):
        root.mkdir()
    (fresh / "d").mkdir()
    (fresh / "d" / "f").write_text("inside")
    (agent / "d").symlink_to(outside)  # d/f would now be outside/f
    found = changes(fresh, agent)
    assert Change("d", ChangeKind.ADDED) in found
    assert Change("d/f", ChangeKind.DELETED) in found
    (fresh / "link").symlink_to(outside)
    (agent / "link").mkdir()
    (agent / "link" / "f").write_text("evil")
    apply_changes([Change("link/f", ChangeKind.ADDED)], agent, fresh)
    assert (outside / "f").read_text() == "original"


def test_a_tree_deeper_than_python_recurses_is_compared(tmp_path: Path) -> None:
    agent, fresh = tmp_path / "agent", tmp_path / "fresh"
    write(agent, {"a.py": "x"})
    fresh.mkdir()
    here = os.open(agent, os.O_DIRECTORY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_DIRECTORY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    assert changes(fresh, agent) == [Change("a.py", ChangeKind.ADDED)]
    subprocess.run(["rm", "-rf", agent], check=True)
