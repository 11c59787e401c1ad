"""Judges that compare the agent's work with a file of the working copy: an agent that changes that file is not trusted.

A judge that only reads runs among the agent's files. The commands are drawn with the names of the files, and so is what
an agent does to them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, Workspace
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.judge_text import COMPARES_FILES, JudgeText
from rolltap.harnesses.evaluators.programs import changed_expectation
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import UNPROTECTED, Task

WAYS = (
    *("diff -q {work} {own}", "cmp ./{own} {work} > /dev/null", "cat {work} | diff - /workspace/{own}"),
    *("! diff -q x {own} || diff {work} {own}", '[ "$(cat {work})" = "$(cat {own})" ]'),
    *('[[ $(sort {own}) == "$(sort {work})" ]]', "diff <(sort {work}) <(sort {own})", "grep -qxf {own} {work}"),
    *("for f in a; do cmp {work} {own} || exit 1; done", 'test -z "$(comm -3 {work} {own})"'),
)  # fmt: skip
HONEST = (
    *("grep -q 8080 {own} && grep -q debug {more}", "test -s {own}; test -s {work}", 'test "$(cat {own})" = 42'),
    *("diff -q {work} {more} && grep -q x {own}", "cmp {own} {more}", "wc -l < {own} | grep -qx 3"),
)
FOLDERS = ("", "out/", "a/b/", "data/")
TESTS = ("tests/e.txt", "spec/want.json", "a/tests/data/x", "test_data.txt")


def place(folder: Path, files: Mapping[str, str]) -> Workspace:
    Files(files)(folder)
    return cast(
        Workspace, SimpleNamespace(folder=folder, workdir=Path("/workspace"), places={Path("/workspace"): folder})
    )


def found(command: str, before: Mapping[str, str], after: Mapping[str, str], folder: Path) -> str:
    clean, agents = place(folder / "clean", before), place(folder / "agents", {**before, **after})
    return changed_expectation(JudgeText.of(command, (), agents), command, clean, agents)


@pytest.mark.parametrize("way", [*WAYS, *HONEST])
def test_who_changes_both_sides_of_a_comparison_is_not_trusted(way: str, tmp_path: Path) -> None:
    for number in range(6):
        work, own, more = (f"{random.choice(FOLDERS)}{name}" for name in ("answer.txt", "expected.txt", "settings.txt"))
        command = way.format(work=work, own=own, more=more)
        before = {own: "42\n", more: "1\n", "calc.py": ""} | random.choice([{}, {work: "?\n"}])
        forged = {work: "x\n", own: "x\n"} | random.choice([{}, {"calc.py": "y"}])
        assert found(command, before, forged, tmp_path / f"forged{number}") in (
            (own, work) if way in WAYS else ("",)
        ), command
        assert COMPARES_FILES.search(command) or way in HONEST
        one_side = {work: "x\n", "calc.py": "y"}
        assert found(command, before, one_side, tmp_path / f"honest{number}") == "", command


@pytest.mark.parametrize("path", TESTS)
def test_who_changes_what_lies_among_tests_is_not_trusted(path: str, tmp_path: Path) -> None:
    for number, way in enumerate(WAYS):
        command = way.format(work="answer.txt", own=path)
        assert found(command, {path: "42\n", "answer.txt": ""}, {path: ""}, tmp_path / f"{number}") == path, command


@pytest.mark.parametrize("tool", ["sha256sum -c {}", "md5sum --check {}", "cat x; sha1sum -wc {}"])
def test_who_changes_sums_is_not_trusted(tool: str, tmp_path: Path) -> None:
    assert found(tool.format("sums.txt"), {"sums.txt": "0", "a": ""}, {"sums.txt": "1"}, tmp_path) == "sums.txt"


async def test_its_reward_is_unprotected(tmp_path: Path) -> None:
    runtime, made = ProcessRuntime(tmp_path), list[Workspace]()

    async def prepare() -> Workspace:
        made.append(await runtime.prepare(Files({"expected.txt": "42\n"})))
        return made[-1]

    async def detail(left: Mapping[str, str], reads_only: bool) -> Mapping[str, Any]:
        agents = await prepare()
        Files(left)(agents.folder)
        evidence = Evidence(Task("t", "x"), Exit(Ending.DONE, 1.0, 0), agents, prepare, Limits(evaluate_s=60))
        verdict = await CommandCheck("diff -q answer.txt expected.txt", reads_only=reads_only).evaluate(evidence)
        assert verdict.scores[0].value == 1.0
        return verdict.detail

    for reads_only in (False, True):
        assert UNPROTECTED not in await detail({"answer.txt": "42\n"}, reads_only)
        assert "expected.txt" in (await detail({"answer.txt": "x\n", "expected.txt": "x\n"}, reads_only))[UNPROTECTED]
    for each in made:
        await each.close()
