"""Judges that take an agent's word: the exit codes of its code, and what test runners say, beside tools that ask it
nothing; and honest ones that count, which are known."""

# ruff: noqa: E501
from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

from rolltap.harnesses.base import Ending, Evidence, Exit, Limits, Workspace
from rolltap.harnesses.evaluators.command import CommandCheck
from rolltap.harnesses.evaluators.runners import runner_in
from rolltap.harnesses.runtimes.bubblewrap import BubblewrapRuntime, refusal
from rolltap.harnesses.runtimes.sources import Files
from rolltap.types import UNPROTECTED, Task

from .test_judge_text import judged

RUN = "$ROLLTAP_SANDBOXED ./check < /dev/null"
ASKS_NOTHING = (
    *("grep -q . /etc/hostname; {0} && echo 1 > r", "[ -f /tests/x ] && {0}", "{0}; echo $? > /tmp/rc; grep -qx 0 /tmp/rc"),
    *("{0}; echo $? | diff - /tests/zero", "{0}; awk -v r=\"$?\" 'BEGIN {{ exit r }}'", "t() {{ {0}; }}; t && grep -q x /tests/y"),
    *("{0}; rc=$?; if (( rc == 0 )); then echo 1 > r; fi", "n=0; {0} && ((n++)); [ $((n * 2)) -eq 2 ]", "wc -l /tests/x; {0}"),
    *("[ -d /tests ] && [[ -s /tests/x ]]; {0}", "sed -n 1p /tests/x; jq . /tests/y.json; {0} && cp /tests/one r", "sort -c /tests/x; {0}"),
    *("{0}; rc=$?; echo \"$rc\" > /tmp/rc; cat /tmp/rc | tee /tmp/b | sed s/x/y/", "codes=(1 0); {0}; [ \"${{codes[1]}}\" = $? ]"),
)  # fmt: skip
"""In each the code has the last word: no tool gets anything of its files or of what it printed."""
ASKS = (
    *("diff out /tests/x", "{0} > /tmp/o; grep -qx 42 /tmp/o", "{0} | cmp - /tests/y", "sha256sum < out", "x=$({0}); awk -v x=\"$x\" 'BEGIN {{ exit x != 3 }}'"),
    *("cat out | jq -e .a", "for f in /tests/*.in; do {0} > /tmp/o; diff /tmp/o \"${{f%.in}}.out\"; done", "f() {{ cmp \"$1\" \"$2\"; }}; f out /tests/x", "[ -s out ]"),
)  # fmt: skip


@pytest.mark.parametrize("form", ASKS_NOTHING)
def test_a_judge_whose_tools_ask_nothing_of_the_agents_does_not_decide(form: str) -> None:
    judge = judged(form.format(RUN))
    assert (judge.decides, judge.unknown) == (False, "")
    for text in ASKS:
        assert judged("\n".join(random.sample([form.format(RUN), text.format(RUN)], 2))).decides, text


STARTED = (
    *("pytest -q", "python3 -m pytest x", "timeout 5 python3 -u -m unittest discover", "env A=b npm test", "npm run test:unit", "make -s check"),
    *("bash -c 'cd x && npm test'", "bash -lc 'make -s check'", "cargo nextest run", "cargo test", "go test ./...", "node --test", "./gradlew test"),
    *("uv run pytest", "npx jest", "poetry run pytest", "coverage run -m pytest", "python manage.py test", ".venv/bin/pytest", "tox", "bundle exec rspec"),
)  # fmt: skip
NOT_STARTED = (
    *("--", "make build", "make -C tests", "cargo run --bin test", "cargo build --tests", "cat pytest.ini", "python3 -c 'import pytest'", "python3 test.py"),
    *("node test.js", "go run ./test", "npm run build", "grep -r pytest .", "python3 solution.py pytest", "./app test", "npm --prefix test run build", "node check"),
)  # fmt: skip


def test_test_runners_are_known_by_the_commands_that_start_them() -> None:
    assert [each for each in STARTED if not runner_in(shlex.split(each))] == []
    assert [each for each in NOT_STARTED if runner_in(shlex.split(each))] == []


COUNTED = (
    "n=0; for f in /tests/*.in; do diff out \"${f%.in}.out\" && n=$((n + 1)); done; [ \"$n\" -eq 3 ]",
    "pass=0; cmp a /tests/b && ((pass += 1)); echo \"$((pass * 100 / 3))\" > reward.txt",
    "a=(1 2); b=(x y); for i in \"${!a[@]}\"; do cmp \"o${a[$i]}\" \"/tests/${b[$i]}\" || exit 1; done; echo ${#a[@]}",
    "total=0; while IFS=$'\\t' read -r given want; do total=$((total+1)); done < /tests/cases; (( total == 3 )) && diff a b",
)  # fmt: skip
COUNTED_OF_AGENTS = (
    *("read n < out; x=$((n+1))", "x=$(cat out); ((x > 3))", "x=$(cat out); y=$x; (( y == 3 ))", "f() { x=$1; echo $((x+1)); }; f \"$(cat out)\""),
    *("for x in $(cat out); do s=$((x)); done", "for x in *; do s=$((x)); done", "x=1; x+=$(cat o); s=$((x))", "read n < out; v=${a[$n]}", "x=$(cat o); v=${y#$x}"),
    *("x=1; xy=2; read y < out; echo $((x $y))", "x=1; xy=2; read y < out; echo $((x$y))", "a=(1); read -a a < o; [ ${a[0]} = 1 ]", "a=(1); a+=($(cat o)); [ ${a[0]} = 1 ]"),
    *("for f in /workspace/*; do diff $f /tests/x; done", "for f in /tmp/*; do diff $f x; done", "for f in /tests/../workspace/*; do diff $f x; done", "x=y; [ ${!x} = 1 ]"),
    *("x=1; while read -r x; do echo $((x)); done < out", "x=(a);./new", "a=(./new); \"${a[0]}\"", "g/bin/rep x y", "python3 -c 'import pytest; pytest.main([\"-q\"])'"),
)  # fmt: skip
"""In each, bash computes or splits a value of the agent's, or starts its program."""


@pytest.mark.parametrize("text", COUNTED)
def test_a_judge_may_count(text: str) -> None:
    judge = judged(text)
    assert (judge.unknown, judge.decides, judge.follows) == ("", True, "")


@pytest.mark.parametrize("text", COUNTED_OF_AGENTS)
def test_what_is_counted_of_the_agents_is_not_known(text: str) -> None:
    assert judged(f"{text}\ndiff out /tests/x").unknown


@pytest.mark.skipif(bool(refusal()), reason="this machine allows no sandbox")
@pytest.mark.parametrize(
    "reads", ["> log; ! grep -q failed log", "| grep -q passed", "&& [ -f calc.py ]", "|| exit 1; wc calc.py"]
)
async def test_what_a_test_runner_says_is_unprotected(reads: str, tmp_path: Path) -> None:
    """The agent's `conftest.py`, or its code, says that all passed."""
    runtime, source = (
        BubblewrapRuntime(tmp_path),
        Files({"calc.py": "def add(a, b): ...\n", "Makefile": "test:\n\tsh t.sh\n"}),
    )
    agents = await runtime.prepare(source)

    async def prepare() -> Workspace:
        return await runtime.prepare(source)

    try:
        (agents.folder / "Makefile").write_text("test:\n\t@echo 1 passed\n")
        evidence = Evidence(Task("t", "x"), Exit(Ending.DONE, 1.0, 0), agents, prepare, Limits(evaluate_s=60))
        check = CommandCheck(f"$ROLLTAP_SANDBOXED make test < /dev/null {reads}")
        verdict = await check.evaluate(evidence)
        assert verdict.scores[0].value == 1.0
        assert "the word of a test runner (make test)" in verdict.detail[UNPROTECTED]
    finally:
        await agents.close()
