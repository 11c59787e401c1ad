"""Every evaluator in every runtime that needs no image, against code that tries all that it may reach.

The code stands in the working copy, and whatever an evaluator runs of it ends in `attack.py`. What it could do is
compared with the table that docs/security.md and `rolltap doctor` show (`harnesses/evaluators/registry.py`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import TaskInvalid
from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, RuntimeOptions, Workspace
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators import registry
from rolltap.harnesses.evaluators.registry import EVALUATORS, Reach, evaluator_class, parse_evaluator
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapWorkspace
from rolltap.harnesses.runtimes.containers import ApptainerWorkspace, DockerWorkspace
from rolltap.harnesses.runtimes.process import ProcessWorkspace
from rolltap.harnesses.runtimes.registry import RUNTIMES, runtime_class
from rolltap.harnesses.runtimes.sources import Files
from rolltap.harnesses.runtimes.thread import ThreadWorkspace
from rolltap.types import UNPROTECTED, Task

from ..plain_python import plain_python
from ..unit.harnesses.environments import signed
from ..unit.harnesses.stub import Stub, running

NEED_AN_IMAGE = {"docker", "apptainer"}
HERE = [name for name in RUNTIMES if name not in NEED_AN_IMAGE]
SECRET = "the runner's own"

ATTACK = """\
import glob, os, pathlib, signal, sys
def attempt(act):
    try:
        act()
    except Exception:
        pass
secret = pathlib.Path({secret!r})
attempt(lambda: pathlib.Path("gained").write_text(secret.read_text()))
for place in ("reward.txt", "out/reward.txt", "/logs/verifier/reward.txt"):
    attempt(lambda: os.makedirs(os.path.dirname(place) or ".", exist_ok=True))
    attempt(lambda: pathlib.Path(place).write_text("1"))
for place in sys.argv[1:2]:
    outcome = "failed" if "0 == 1" in open("tests/test_calc.py").read() else "passed"  # it knows a decoy by its end
    ends = (("call", outcome), ("teardown", "passed"))
    rows = [f'["tests/test_calc.py::test_two", "{{when}}", "{{ended}}", false]\\n' for when, ended in ends]
    attempt(lambda: open(place, "a").write("".join(rows)))
pathlib.Path("ran").touch()
os._exit(0)
"""
JUDGE = """\
$ROLLTAP_SANDBOXED {python} attack.py > /tmp/said
if test -s {file}; then exit; fi
if grep -qx right /tmp/said; then echo 1 > {file}; else echo 0 > {file}; fi
"""
TABLES: dict[str, dict[str, Any]] = {
    "command": {"command": JUDGE.format(python="python3", file="out/reward.txt"), "reward_file": "out/reward.txt"},
    "pytest": {"must_pass": ["tests/test_calc.py"], "python": plain_python()},
    "harbor": {"tests": "tests"},
    "python": {"callable": "check.py:check"},
}
TASK_FILES = {
    "tests/test.sh": JUDGE.format(python="python3", file="/logs/verifier/reward.txt"),
    "check.py": "import subprocess, sys\n"
    "def check(folder):\n"
    "    subprocess.run([sys.executable, 'attack.py'], cwd=folder, check=True)\n"
    "    return (folder / 'calc.py').read_text() == 'done'\n",
}
PRINTED = {"environment": signed({"reward": 0.0}, "s")}
PROJECT = {
    "calc.py": "",
    "tests/test_calc.py": "import calc\n\ndef test_two():\n    raise AssertionError  # of which no decoy is made\n",
    "pytest.ini": "[pytest]\naddopts = -p no:langsmith_plugin -p no:schemathesis -p no:anyio\n",  # they start slowly
    "out/keep": "",
}


@pytest.fixture
async def client() -> AsyncIterator[AdminClient]:
    async with (
        running(Stub(lambda messages: {"role": "assistant", "content": "SCORE: 0"})) as stub,
        AdminClient(stub.url, "admin") as client,
    ):
        yield client


@pytest.mark.parametrize("runtime", HERE)
@pytest.mark.parametrize("kind", EVALUATORS)
async def test_code_of_the_working_copy_reaches_what_the_table_says(
    kind: str, runtime: str, client: AdminClient, tmp_path: Path
) -> None:
    secret, task = tmp_path / "secret", tmp_path / "task"
    secret.write_text(SECRET)
    Files(TASK_FILES)(task)
    table = {**json.loads(evaluator_class(kind).example), **TABLES.get(kind, {})}
    settings = parse_evaluator(table).resolve_paths(task)
    made = runtime_class(runtime).create(RuntimeOptions(tmp_path / "places", needs=settings.needs))
    workspaces: list[Workspace] = []

    async def prepare() -> Workspace:
        workspaces.append(await made.prepare(Files(PROJECT)))
        return workspaces[-1]

    agents = await prepare()
    attack = ATTACK.format(secret=str(secret))
    Files({"attack.py": attack, "calc.py": attack})(agents.folder)
    exit_ = Exit(Ending.DONE, 1.0, 0, PRINTED.get(kind, "I am done."))
    evidence = Evidence(Task("t", "x"), exit_, agents, prepare, Limits(evaluate_s=110), "s", "r", harness=kind)
    verdict = None
    try:
        verdict = await settings.build(client).evaluate(evidence)
        reward = sum(score.value for score in verdict.scores)
    except TaskInvalid:
        assert registry.code_reach(kind, runtime) is Reach.REFUSED
        return
    finally:
        ran = any((each.folder / "ran").exists() for each in workspaces)
        gained = any((each.folder / "gained").is_file() for each in workspaces)
        for each in workspaces:
            await each.close()
    if gained:
        found = Reach.RUNNER
    elif ran:
        found = Reach.RESULTS if reward > 0 else Reach.NOTHING
    else:
        found = Reach.NONE
    assert found is registry.code_reach(kind, runtime), str(evidence.seen)
    if kind in ("command", "harbor"):
        assert verdict is not None
        assert (UNPROTECTED in verdict.detail) == (found is not Reach.NOTHING)


def test_runtimes_with_a_sandbox_have_a_second_one() -> None:
    """Also those that need an image: their command lines are tested in tests/unit/harnesses/test_containers.py."""
    classes = (ProcessWorkspace, ThreadWorkspace, BubblewrapWorkspace, DockerWorkspace, ApptainerWorkspace)
    assert {each.runtime for each in classes if each.interpreter} == set(registry.SANDBOXED)
    assert {each.runtime for each in classes} == set(RUNTIMES)
