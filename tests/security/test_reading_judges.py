"""Judges of which a task says that they only read (`reads_only`): they run among the agent's files.

What such a judge loads is drawn: a module of Python's that the agent planted, or a program of the working copy.
"""

# ruff: noqa: E501
from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, Verdict, Workspace
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import UNPROTECTED, Task

MODULES = ("json", "csv", "decimal", "statistics", "fractions", "string", "textwrap", "html")
STARTS = (
    *("python3 {0}.py", "python3 ./{0}.py out.txt", "bash {0}.sh", ". ./{0}.sh", "./{0}.sh", "python3 - < {0}.py", "sh < {0}.sh"),
    *("cat {0}.sh | sh", "python3 -m {0}", "cd sub && python3 {0}.py", "eval \"$(cat {0}.sh)\"", "awk -f {0}.awk"),
    "python3 -c 'import runpy; runpy.run_path(\"{0}.py\")'",
)  # fmt: skip


async def judged(command: str, left: dict[str, str], folder: Path, *, is_sandboxed: bool) -> Verdict:
    runtime = BubblewrapRuntime(folder, shown=(Path(sys.prefix),)) if is_sandboxed else ProcessRuntime(folder)
    made = list[Workspace]()

    async def prepare() -> Workspace:
        made.append(await runtime.prepare(Files({"calc.py": ""})))
        return made[-1]

    agents = await prepare()
    Files(left)(agents.folder)
    for path in left:
        (agents.folder / path).chmod(0o755)
    evidence = Evidence(Task("t", "x"), Exit(Ending.DONE, 1.0, 0), agents, prepare, Limits(evaluate_s=110))
    try:
        return await CommandCheck(command, reads_only=True).evaluate(evidence)
    finally:
        for each in made:
            await each.close()


@pytest.mark.parametrize("is_sandboxed", [True, False])
async def test_a_judge_that_only_reads_loads_no_module_of_the_agents(is_sandboxed: bool, tmp_path: Path) -> None:
    module = random.choice(MODULES)
    evil = {random.choice((f"{module}.py", f"{module}/__init__.py")): "import os\nos._exit(0)\n"}
    command = f'python3 -c \'import {module}, sys; sys.exit(open("out.txt").read() != "42")\''
    for answer, worth in {"41": 0.0, "42": 1.0}.items():
        verdict = await judged(command, {"out.txt": answer, **evil}, tmp_path, is_sandboxed=is_sandboxed)
        assert (verdict.scores[0].value, UNPROTECTED in verdict.detail) == (worth, False), module


@pytest.mark.parametrize("form", STARTS)
async def test_a_judge_that_starts_what_lies_among_the_agents_files_does_not_only_read(
    form: str, tmp_path: Path
) -> None:
    name = random.choice(("check", "grade", "verify_it"))
    forged: dict[str, str] = dict.fromkeys((f"{name}.sh", f"sub/{name}.py", f"{name}.py", f"{name}.awk"), "")
    verdict = await judged(form.format(name), forged, tmp_path, is_sandboxed=random.choice((True, False)))
    assert UNPROTECTED in verdict.detail
    reads = random.choice(
        ("rev out.txt | grep -qx 24", "iconv out.txt | grep -qx 42", "nproc > /dev/null; cat out.txt")
    )
    verdict = await judged(reads, {"out.txt": "42\n"}, tmp_path, is_sandboxed=random.choice((True, False)))
    assert (verdict.scores[0].value, UNPROTECTED in verdict.detail) == (1.0, False)
