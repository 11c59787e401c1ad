"""Task files: what is read, and what is refused with one line."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from rolltap.errors import TaskInvalid
from rolltap.harnesses.base import Limits
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.harbor import HarborCheck
from rolltap.harnesses.evaluators.pytest_check import PytestCheck
from rolltap.harnesses.evaluators.python_check import PythonProgram, PythonTable
from rolltap.harnesses.evaluators.python_child import load_check
from rolltap.harnesses.runner.snapshots import SnapshotStore
from rolltap.harnesses.runner.specs import Defaults, LimitsSpec, build, check, resolve_paths
from rolltap.harnesses.runner.tasks import read_tasks
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.containers import DockerRuntime
from rolltap.harnesses.runtimes.registry import RUNTIMES

CLIENT = AdminClient("http://127.0.0.1:1", "k")
GOOD = {
    "id": "one",
    "instruction": "Fix it.",
    "files": {"a.txt": "x"},
    "evaluator": {"kind": "command", "command": "true"},
    "harness": "codex",
    "limits": {"agent_s": 60, "turns": 12},
    "tags": ["easy"],
}


def lines(tmp_path: Path, *tasks: object) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(task if isinstance(task, str) else json.dumps(task) for task in tasks))
    return path


def test_a_task_may_set_every_limit() -> None:
    assert LimitsSpec.__struct_fields__ == tuple(limit.name for limit in fields(Limits))


def test_a_line_becomes_an_assignment(tmp_path: Path) -> None:
    (task,) = read_tasks(lines(tmp_path, GOOD))
    assignment = build(task, Defaults(runtime="process"), CLIENT)
    assert (task.id, task.instruction, task.tags) == ("one", "Fix it.", ("easy",))
    assert (assignment.harness.name, assignment.evaluator.name) == ("codex", "command")
    assert (assignment.limits.agent_s, assignment.limits.turns, assignment.limits.evaluate_s) == (60, 12, 600)
    (tmp_path / "w").mkdir()
    assignment.source(tmp_path / "w")
    assert (tmp_path / "w" / "a.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"evaluator": None}, 'needs an `evaluator` with a `kind`; {"kind": "session_completed"} is the simplest'),
        ({"evaluator": {"kind": "comand"}}, "no evaluator 'comand'; known: command, environment, harbor"),
        ({"evaluator": {"kind": "command"}}, 'the field `command` is missing; for example {"kind": "command", '),
        ({"evaluator": {"kind": "pytest", "must_pass": []}}, "`must_pass` and `keep_passing` name no test"),
        ({"files": {"../x": ""}}, "leaves the task's folder"),
        ({"files": {"/etc/x": ""}}, "leaves the task's folder"),
        ({"folder": "../secrets", "files": None}, "leaves the task's folder"),
        ({"folder": "a"}, "one of files, folder"),
        ({"hrness": "codex"}, "unknown field `hrness`"),
        ({"limits": {"turns": "many"}}, r"limits\.turns: expected"),
        ({"instruction": " "}, "no `instruction`"),
        ({"tags": "easy"}, "list of strings"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(TaskInvalid, match=message) as caught:
        read_tasks(lines(tmp_path, GOOD, {**GOOD, "id": "two", **change}))
    assert "tasks.jsonl:2:" in caught.value.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"harness": "codecs"}, "no harness 'codecs'; known: aider"),
        ({"harness": ""}, "names no harness"),
        ({"runtime": "podman"}, "no runtime 'podman'; known: apptainer, bubblewrap"),
        ({"runtime": "docker"}, "needs an image"),
        ({"image": "debian"}, "has no images"),
        ({"limits": {"agent_s": -1}}, "negative"),
        ({"evaluator": {"kind": "python", "callable": "nowhere:f"}}, "no callable"),
        (
            {"evaluator": {"kind": "python", "callable": "/nowhere.py:f"}},
            "no callable '/nowhere.py:f'.*FILE.py:function",
        ),
        ({"files": None, "repository": "/nowhere"}, "not a git repository"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_runs(tmp_path: Path, change: dict[str, object], message: str) -> None:
    def attempt() -> None:
        (task,) = read_tasks(lines(tmp_path, {**GOOD, **change}))
        build(task, Defaults(), CLIENT)

    with pytest.raises(TaskInvalid, match=message):
        attempt()


SNAPSHOTS = {
    "docker": "containers of 'docker' do not reach",
    "process": "in 'process' each rollout has a folder of its own",
    "podman": "no runtime 'podman'",
    "thread": "",
    "bubblewrap": "",
    "apptainer": "",
}
"""The runtimes, and why a task that wants snapshots there is refused."""


def test_every_runtime_keeps_snapshots_or_is_named_here() -> None:
    assert SNAPSHOTS.keys() >= RUNTIMES.keys()


@pytest.mark.parametrize("runtime", SNAPSHOTS)
@pytest.mark.parametrize("named", ["by the task", "by the node"])
def test_snapshots_are_refused_before_a_rollout_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, named: str
) -> None:
    """By the server where the task names the runtime, else by the node that has it."""
    monkeypatch.setattr(BubblewrapRuntime, "create", classmethod(lambda cls, options: cls()))  # without a sandbox, too
    harness = "mini-swe-agent-inprocess" if runtime == "thread" else "codex"
    (tmp_path / "image.sif").touch()
    image = str(tmp_path / "image.sif") if runtime in ("docker", "apptainer") else ""
    asked = {**GOOD, "harness": harness, "snapshots": True, "image": image}
    by_the_task = named == "by the task"
    (task,) = read_tasks(lines(tmp_path, {**asked, "runtime": runtime} if by_the_task else asked))
    defaults = Defaults(runtime="" if by_the_task else runtime, snapshots=tmp_path)
    for refuses in [*([lambda: check(task, ())] if by_the_task else []), lambda: build(task, defaults, CLIENT)]:
        if SNAPSHOTS[runtime]:
            with pytest.raises(TaskInvalid, match=SNAPSHOTS[runtime]):
                refuses()
        else:
            refuses()
    if not SNAPSHOTS[runtime]:
        assert build(task, defaults, CLIENT).snapshots == SnapshotStore(tmp_path)


def test_a_python_check_lies_beside_its_task_file(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text("HALF = 0.5\ndef half(folder):\n    return HALF\n")
    evaluator = {"kind": "python", "callable": "checks.py:half"}
    (task,) = read_tasks(lines(tmp_path, {**GOOD, "evaluator": evaluator}))
    submitted = resolve_paths(task, Defaults(base=tmp_path))
    assert submitted.spec["evaluator"]["callable"] == f"{tmp_path}/checks.py:half"
    check = build(submitted, Defaults(), CLIENT).evaluator
    assert isinstance(check, PythonProgram)
    assert load_check(check.table.callable)(tmp_path) == 0.5
    (outside,) = read_tasks(lines(tmp_path, {**GOOD, "evaluator": {**evaluator, "callable": "../checks.py:half"}}))
    with pytest.raises(TaskInvalid, match="leaves the task's folder"):
        resolve_paths(outside, Defaults(base=tmp_path))


def test_python_checks_of_one_name_in_two_folders_may_declare_dataclasses(tmp_path: Path) -> None:
    values = []
    for number in (1, 2):
        file = tmp_path / f"{number}" / "checks.py"
        file.parent.mkdir()
        part = f"@dataclass\nclass Part:\n    weight: float = {number}.0\n"
        head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        file.write_text(f"{head}{part}def check(folder):\n    return Part().weight\n")
        values.append(load_check(PythonTable(f"{file}:check").build(CLIENT).table.callable)(tmp_path))
    assert values == [1.0, 2.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no task"), ("{", ":1: not JSON"), ("[]", "a task is a JSON object"), ("[" * 100_000, "not JSON")],
)
def test_files_that_are_no_tasks(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TaskInvalid, match=message):
        read_tasks(lines(tmp_path, text))


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**GOOD, "instruction": "Fix\u2028it."}, ensure_ascii=False), encoding="utf-8")
    (task,) = read_tasks(path)
    assert task.instruction == "Fix\u2028it."


def test_a_tasks_folder_is_found_beside_its_file_whatever_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "start").mkdir()
    (task,) = read_tasks(lines(tmp_path, {**GOOD, "files": None, "folder": "start"}))
    assert resolve_paths(task, Defaults(base=tmp_path)).spec["folder"] == f"{tmp_path}/start"


def test_ids_are_unique_and_files_exist(tmp_path: Path) -> None:
    with pytest.raises(TaskInvalid, match="two tasks have the id 'one'"):
        read_tasks(lines(tmp_path, GOOD, GOOD))
    with pytest.raises(TaskInvalid, match="can't read"):
        read_tasks(tmp_path / "none.jsonl")


def harbor(folder: Path, toml: str) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "environment" / "data.txt").write_text("1")
    (folder / "tests" / "test.sh").write_text("true")
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Sum the data.")
    return folder


def test_harbor_folders(tmp_path: Path) -> None:
    limits = "[agent]\ntimeout_sec = 120.0\n[verifier]\ntimeout_sec = 30.0\nenv = {A = 1}\n"
    harbor(tmp_path / "sum", 'version = "1.0"\n[metadata]\ntags = ["math"]\n' + limits)
    harbor(tmp_path / "image", '[task]\nname = "me/img"\n[environment]\ndocker_image = "debian:12"\n')
    image, plain = read_tasks(tmp_path, reward_key="accuracy")
    first = build(plain, Defaults(harness="codex", runtime="bubblewrap"), CLIENT)
    assert (plain.id, plain.tags, first.limits.agent_s, first.limits.evaluate_s) == ("sum", ("math",), 120.0, 30.0)
    assert isinstance(first.evaluator, HarborCheck)
    assert (first.evaluator.env, first.evaluator.reward_key) == ({"A": "1"}, "accuracy")
    (tmp_path / "w").mkdir()
    first.source(tmp_path / "w")
    assert (tmp_path / "w" / "data.txt").read_text() == "1"
    second = build(image, Defaults(harness="codex", runtime="docker"), CLIENT)
    assert image.id == "me/img"
    assert isinstance(second.runtime, DockerRuntime)
    assert second.runtime.image == "debian:12"
    with pytest.raises(TaskInvalid, match="no Harbor task"):
        read_tasks(tmp_path / "w")


@pytest.mark.parametrize("toml", ['task = "sum"', "environment = 1", "[verifier]\nenv = []", "agent = [1]"])
def test_a_table_of_harbors_that_is_none_is_named(toml: str, tmp_path: Path) -> None:
    folder = harbor(tmp_path / "sum", toml)
    with pytest.raises(TaskInvalid, match="is a table, not"):
        read_tasks(folder)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_swe_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    repository = tmp_path / "repos" / "acme__calc"
    repository.mkdir(parents=True)
    git(repository, "init", "-q")
    (repository / "calc.py").write_text("broken")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "base")
    base = git(repository, "rev-parse", "HEAD")
    (repository / "calc.py").write_text("the answer")
    git(repository, "commit", "-qam", "fix")
    instance = {
        "instance_id": "acme__calc-1",
        "repo": "acme/calc",
        "base_commit": base,
        "problem_statement": "add is broken",
        "test_patch": "",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_two"]',
        "PASS_TO_PASS": ["tests/test_calc.py::test_zero"],
        "hints_text": "ignored",
    }
    (task,) = read_tasks(lines(tmp_path, instance), tmp_path / "repos")
    assignment = build(task, Defaults(harness="codex"), CLIENT)
    assert isinstance(assignment.evaluator, PytestCheck)
    assert assignment.evaluator.must_pass == ("tests/test_calc.py::test_two",)
    work = tmp_path / "w"
    work.mkdir()
    assignment.source(work)
    assert (work / "calc.py").read_text() == "broken"
    kinds = git(work, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)").split()
    assert git(work, "log", "--all", "--format=%s") == "base"
    assert kinds.count("commit") == 1, "the fix can't be found, whatever an agent looks through"
    with pytest.raises(TaskInvalid, match="give --repositories"):
        read_tasks(lines(tmp_path, instance))
    for tests in ({}, {"FAIL_TO_PASS": []}, {"FAIL_TO_PASS": "[]"}):
        untested = {key: value for key, value in instance.items() if key != "FAIL_TO_PASS"} | tests
        with pytest.raises(TaskInvalid, match="acme__calc-1: `FAIL_TO_PASS` names no test"):
            read_tasks(lines(tmp_path, untested), tmp_path / "repos")


@pytest.mark.parametrize("name", ["..", ".", "a\0b"])
def test_an_instance_names_no_folder_outside_the_repositories(tmp_path: Path, name: str) -> None:
    """A file of instances may be anybody's, and what it names is copied to the agent."""
    instance = {
        "instance_id": "x",
        "repo": name,
        "base_commit": "HEAD",
        "problem_statement": "x",
        "FAIL_TO_PASS": ["t"],
    }
    with pytest.raises(TaskInvalid, match="names no repository"):
        read_tasks(lines(tmp_path, instance), tmp_path / "repos")


def test_a_sandbox_shows_the_python_that_runs_the_tests_and_nothing_else_of_its_neighbourhood(tmp_path: Path) -> None:
    for python, shown in ((tmp_path / "venv/bin/python", (tmp_path / "venv",)), (tmp_path / "bin/python", ())):
        python.parent.mkdir(parents=True)
        python.touch()
        (tmp_path / "venv" / "pyvenv.cfg").touch()
        evaluator = {"kind": "pytest", "must_pass": ["test_a.py"], "python": str(python)}
        (task,) = read_tasks(lines(tmp_path, {**GOOD, "evaluator": evaluator, "harness": "command", "argv": ["true"]}))
        runtime = build(task, Defaults(runtime="bubblewrap"), CLIENT).runtime
        assert isinstance(runtime, BubblewrapRuntime)
        assert runtime.shown == shown
