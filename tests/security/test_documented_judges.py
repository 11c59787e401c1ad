"""The judges that the documentation shows, attacked: code that prints every answer is worth nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, Workspace
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime, refusal
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import UNPROTECTED, Task

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
TASK = re.compile(r'^\{"id".*?"files": (?P<files>\{[^}]*\}).*?"command":\s*(?P<command>"(?:[^"\\]|\\.)*")', re.M | re.S)
SHOWN = [
    pytest.param(json.loads(task["files"]), json.loads(task["command"]), id=f"{page.stem}-{number}")
    for page in PAGES
    for number, task in enumerate(TASK.finditer(page.read_text()))
]
WORK = {
    "fixed": ("def add(a, b):\n    return a + b\n", 1),
    "undone": ("def add(a, b):\n    return a - b\n", 0),
    **{
        f"all up to {most}": (
            "import os\n"
            f"lines = (f'{{a}} {{b}}\\n' for a in range({most}) for b in range(100))\n"
            "os.write(1, ''.join(lines).encode())\n"
            "add = lambda a, b: 0\n",
            0,
        )
        for most in (3, 300)
    },
    "the answer among others": ("print('2 42')\nadd = lambda a, b: 0\n", 0),
}
pytestmark = pytest.mark.skipif(bool(refusal()), reason="this machine allows no sandbox")


def test_tasks_are_found() -> None:
    assert len(SHOWN) >= 2


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(("files", "command"), SHOWN)
async def test_who_prints_every_answer_gets_nothing(
    work: str, files: dict[str, str], command: str, tmp_path: Path
) -> None:
    code, worth = WORK[work]
    runtime, source = BubblewrapRuntime(tmp_path), Files(files)
    agents = await runtime.prepare(source)

    async def prepare() -> Workspace:
        return await runtime.prepare(source)

    try:
        (agents.folder / "calc.py").write_text(code)
        evidence = Evidence(Task("t", "Fix add."), Exit(Ending.DONE, 1.0, 0), agents, prepare, Limits(evaluate_s=120))
        verdict = await CommandCheck(command).evaluate(evidence)
        assert verdict.scores[0].value == worth
        assert UNPROTECTED not in verdict.detail
    finally:
        await agents.close()
