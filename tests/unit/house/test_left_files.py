"""What an agent left is opened and listed by `LeftFiles` alone, which follows no link and reads no pipe."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
HARNESSES = ROOT / "harnesses"
PLACES = (
    *sorted((HARNESSES / "evaluators").glob("*.py")),
    *sorted((HARNESSES / "logs").glob("*.py")),
    *(HARNESSES / "runner" / name for name in ("attempts.py", "lifecycle.py", "snapshots.py", "tampering_scan.py")),
    *(HARNESSES / "runtimes" / name for name in ("folders.py", "code_sandbox.py")),
    HARNESSES / "harbor" / "agent.py",
    HARNESSES / "left_files.py",
)
"""The modules that get a working copy or HOME after an agent ran."""
READS = {
    *("open", "read_text", "read_bytes", "walk", "fwalk", "listdir", "scandir", "iterdir", "glob", "rglob", "connect"),
    *("copy", "copy2", "copyfile", "copytree", "cmp", "dircmp", "write_text", "write_bytes", "touch", "mkdir"),
}
ALLOWED = {
    "code_sandbox.py:CodeSandbox.__aenter__": "its own folder",
    "command.py:_clear": "an empty folder in place of what the agent put there, once no process is left",
    "folders.py:FolderWorkspace.code_helper": "its own folder",
    "folders.py:Folders.write_home": "new files; what is in their places is removed before, once no process is left",
    "folders.py:_make": "new folders, before the agent",
    "folders.py:_make_code_folders": "new folders beside the agent's",
    "folders.py:empty_folder": "a new folder in place of what was there",
    "formats.py:_rows": "a copy that `LeftFiles` made, in the reader process",
    "harbor.py:HarborCheck._source": "the task's own test.sh",
    "harbor.py:HarborCheck.evaluate": "the task's own tests, and its own folder",
    "intake.py:StartingState.of": "a clean workspace before the agent's changes",
    "left_files.py:CopyBudget.copy": "its target, new",
    "left_files.py:_same": "compares what is a regular file on both sides, once no process is left",
    "left_files.py:copy_out": "its target, which no agent sees",
    "left_files.py:_make_folder": "makes folders in a clean workspace, not through links; copies by `LeftFiles`",
    "pytest_check.py:_identities": "a clean workspace before the agent's changes",
    "pytest_check.py:_is_python_prefix": "this machine's Python",
    "pytest_check.py:_write_decoys": "a new file in place of one of the task, which `LeftFiles` read and removed",
    "pytest_check.py:_write_again": "the same",
    "pytest_check.py:find_configuration": "a clean workspace before the agent's changes",
    "python_check.py:PythonProgram.evaluate": "a file in the HOME of the check's own process",
    "python_child.py:run_check": "the same",
    "snapshots.py:SessionSnapshots._save": "a new folder, which no agent sees",
    "snapshots.py:SessionSnapshots._write_index": "the same",
    "snapshots.py:SnapshotStore._make_room": "folders that no agent sees",
    "snapshots.py:SnapshotStore.find": "the same",
    "snapshots.py:_index": "a file that no agent sees",
    "snapshots.py:_replace": "a workspace before its agent",
    "snapshots.py:save": "its target, which no agent sees",
    "tampering_scan.py:_walk": "lists folders, no links to folders",
}
"""Where something else is done, and why it can be: `module:function`."""


def reads(source: str, name: str) -> Iterator[str]:
    """`module:function` of each call that opens, lists, copies or makes files without `LeftFiles`."""

    def visit(node: ast.AST, function: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call) and _called(child) in READS and not _by_helper(child):
                yield f"{name}:{function}"
            yield from visit(child, inner)

    return visit(ast.parse(source), "")


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _by_helper(call: ast.Call) -> bool:
    """`LeftFiles(...).open(...)`, a method of what is named so for one, or of a parser."""
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    if isinstance(owner, ast.Call):
        return _called(owner) == "LeftFiles"
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return name in {"left", "source", "budget", "home", "work", "ast"}


def test_no_other_way_leads_into_what_an_agent_left() -> None:
    found = {each for path in PLACES for each in reads(path.read_text(encoding="utf-8"), path.name)}
    found = {each for each in found if not each.startswith("left_files.py:LeftFiles.")}
    assert found == set(ALLOWED)


def test_the_lint_finds_reads() -> None:
    source = "def f(workspace):\n    return (workspace.folder / 'x').read_text() + open(workspace.folder).read()\n"
    assert list(reads(source, "m.py")) == ["m.py:f", "m.py:f"]
    assert list(reads("def f(folder):\n    LeftFiles(folder).open('x')\n", "m.py")) == []
