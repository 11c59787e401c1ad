"""Every test is in some stage of `scripts/stages.py`; CI takes the long stages in turn; what is left out is named."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from ...conftest import COLLECTED
from ...durations import FRESH_S, CpuSeconds, Durations
from .product import ROOT

STAGES = runpy.run_path(str(ROOT / "scripts" / "stages.py"))
TESTS: tuple[Any, ...] = tuple(stage for stage in STAGES["STAGES"].values() if hasattr(stage, "marks"))
LONG: tuple[Any, ...] = STAGES["LONG"]
MARKS = {line.partition(":")[0] for line in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
         ["tool"]["pytest"]["ini_options"]["markers"]}  # fmt: skip


def stages_of(path: str, marks: set[str]) -> list[str]:
    """The stages that run a case of this file with these marks."""
    return [
        stage.name
        for stage in TESTS
        if any(path == each or path.startswith(f"{each}/") for each in stage.paths)
        and Expression.compile(stage.marks).evaluate(lambda name, /, **_: name in marks)
    ]


def test_every_test_that_was_collected_is_in_one_stage(request: pytest.FixtureRequest) -> None:
    """Of the whole suite in `make test`; a sample is in two."""
    kinds = {(path, marks & MARKS) for path, marks in request.config.stash[COLLECTED]}
    assert kinds
    stages = {(path, marks): stages_of(path, set(marks)) for path, marks in kinds}
    assert [kind for kind, names in stages.items() if not names] == []
    assert [kind for kind, names in stages.items() if len(names) > 1 + ("sample" in kind[1])] == []


def test_every_file_with_tests_is_collected_under_some_stage() -> None:
    listed = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split() if re.search(r"/test_[^/]*\.py$", name)]
    assert len(files) > 300
    outside = [name for name in files if not any(name.startswith(path) for stage in TESTS for path in stage.paths)]
    assert outside == []


def test_every_mark_is_in_some_stage() -> None:
    chosen = {mark: [stage.name for stage in TESTS if re.search(rf"\b{mark}\b", stage.marks)] for mark in MARKS}
    assert [mark for mark, names in chosen.items() if not names] == []
    named = set(re.findall(r"\w+", " ".join(stage.marks for stage in TESTS))) - {"and", "or", "not"}
    assert named <= MARKS


def test_a_file_in_a_long_stage_is_found_by_the_mark_alone() -> None:
    assert stages_of("tests/unit/trainer_client/test_recipe_contract.py", {"long"}) == ["recipes"]
    assert stages_of("tests/unit/trainer_client/test_recipe_contract.py", set()) == ["test"]
    assert stages_of("tests/unit/nowhere/test_x.py", {"long"}) == []
    assert stages_of("tests/harnesses/test_matrix.py", {"harness"}) == ["harnesses"]


def test_stages_name_folders_that_are_there() -> None:
    for stage in TESTS:
        assert [path for path in (*stage.paths, *stage.folders) if not (ROOT / path).exists()] == [], stage.name
        assert set(stage.needs) <= set(STAGES["RESOURCES"])
    assert all(stage.folders for stage in LONG)
    assert set(json.loads((ROOT / ".ci" / "passed.json").read_text(encoding="utf-8"))) <= {one.name for one in LONG}


def test_what_changed_comes_first_and_then_who_waited_longest() -> None:
    first, second, third, fourth = LONG[:4]
    passed = {
        first.name: {"content": "same", "at": "2026-01-02"},
        second.name: {"content": "same", "at": "2026-01-01"},
        third.name: {"content": "other", "at": "2026-01-03"},
        fourth.name: {"content": "same", "at": "2026-01-03"},
    }
    order = [stage.name for stage in STAGES["in_turn"](passed, lambda stage: "same")]
    never = [stage.name for stage in LONG[4:]]
    assert order == [*never, third.name, second.name, first.name, fourth.name]


def test_a_stage_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    too_late, unreachable = STAGES["too_late"], STAGES["unreachable"]
    here, network = (next(stage for stage in LONG if bool(stage.needs) is needs) for needs in (False, True))
    assert too_late(here, 0.0, {}) == ""
    assert too_late(here, 3301.0, {}) == "3301 s have gone by"
    assert too_late(here, 3000.0, {here.name: {"seconds": 2200}}).endswith("it takes about 2200 s")
    for need in network.needs:
        monkeypatch.setitem(STAGES["RESOURCES"], need, lambda: False)
    assert unreachable(here) == ""
    assert unreachable(network) == f"needs {' and '.join(network.needs)}, which can't be reached"


def test_the_closing_line_is_the_sum_in_pytests_words() -> None:
    counts = Counter(passed=7000, failed=0) + Counter(passed=3, skipped=2, failed=1)
    assert STAGES["closing_line"](counts, 3723.4) == "1 failed, 7003 passed, 2 skipped in 3723.40s (1:02:03)"


def test_cpu_seconds_count_a_server_that_left_its_parent() -> None:
    """The child's child goes on after the child has ended."""
    spin = "import time; all(iter(lambda: time.process_time() < 0.4, False))"
    command = ["sh", "-c", f"setsid python3 -c '{spin}' & exit 3"]
    script = f"""
import runpy
stages = runpy.run_path({str(ROOT / "scripts" / "stages.py")!r})
stages["adopt_orphans"]()
code, cpu_s = stages["run_command"]({command!r})
assert code == 3 and cpu_s >= 0.3, (code, cpu_s)
"""
    subprocess.run(["python3", "-c", script], check=True, timeout=60)


def test_cpu_seconds_are_those_of_living_and_of_ended_processes() -> None:
    """Once each: a process that was read while it lived, and ends, isn't counted twice."""
    spin = "import time; all(iter(lambda: time.process_time() < 0.4, False)); print(1, flush=True); input()"
    cpu_seconds = CpuSeconds()
    before = cpu_seconds()
    with subprocess.Popen(["python3", "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(FRESH_S)
        assert 0.35 < cpu_seconds() - before < 0.7
        process.communicate(b"\n")
    assert 0.35 < cpu_seconds() - before < 0.7


PROJECT = {
    "conftest.py": f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.durations import Durations

def pytest_configure(config):
    config.pluginmanager.register(Durations(config))
""",
    "tests/test_them.py": """
import pathlib, time

SEEN = pathlib.Path(__file__).with_name("seen")

def test_passes():
    pass

def test_passes_the_second_time():
    seen = SEEN.exists()
    SEEN.touch()
    print("what it printed")
    assert seen

def test_fails():
    assert False

def test_is_dear():
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass

def test_is_dear_for_a_reason():
    \"\"\"It takes six times the CPU seconds that a case may.\"\"\"
    test_is_dear()
""",
}
LOAD = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("stages", {str(ROOT / "scripts" / "stages.py")!r})
stages = importlib.util.module_from_spec(spec)
sys.modules["stages"] = stages
spec.loader.exec_module(stages)
import pathlib
stages.ROOT = pathlib.Path.cwd()
stages.REPORTS = stages.ROOT / "reports"
stages.FLAKES, stages.DURATIONS = stages.REPORTS / "flakes.jsonl", stages.REPORTS / "durations.json"
stages.PASSED = stages.ROOT / "passed.json"
"""
ALONE = """
outcome = stages.with_second_try(stages.Tests("some", "not none"))
print(json.dumps([outcome.code, outcome.counts, sorted(outcome.failures), [row["case"] for row in outcome.slowest]]))
"""


@pytest.mark.acceptance
def test_what_passes_alone_is_recorded_as_a_flake_and_what_is_dear_needs_a_reason(tmp_path: Path) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "ROLLTAP_CASE_LIMIT_S": "0.1"}
    command = [sys.executable, "-c", LOAD + ALONE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    code, counts, failures, slowest = json.loads(done.stdout.splitlines()[-1])
    tests = "tests/test_them.py::test_"
    assert (code, counts["passed"], counts["failed"]) == (1, 4, 2), (
        "a case whose end fails has passed, too, as pytest counts"
    )
    assert failures == [f"{tests}fails", f"{tests}is_dear"]
    assert set(slowest[:2]) == {f"{tests}is_dear", f"{tests}is_dear_for_a_reason"}
    assert f"FLAKY {tests}passes_the_second_time" in done.stdout
    assert "its docstring has to say why" in done.stdout
    assert f"{tests}is_dear  (its docstring lacks the reason)" in done.stdout
    (flake,) = [json.loads(line) for line in (tmp_path / "reports" / "flakes.jsonl").read_text().splitlines()]
    assert (flake["case"], flake["stage"]) == (f"{tests}passes_the_second_time", "some")
    assert "what it printed" in flake["output"]


def test_a_case_without_a_reason_is_named_however_many_cost_more(pytestconfig: pytest.Config) -> None:
    explained = {f"explained {number}": (100.0 + number, 0.0) for number in range(100)}
    durations = Durations(pytestconfig, {**explained, "unexplained": (11.0, 0.0), "cheap": (1.0, 0.0)}, {"unexplained"})
    assert durations.dearest() == [*(f"explained {number}" for number in range(99, 69, -1)), "unexplained"]


TIER = """
stages.PASSED.write_text("{}")
stages.RESOURCES = {"the moon": lambda: False}
passes = "tests/test_them.py::test_passes"
stages.CORE = (stages.Command("first", ("true",)), stages.Tests("second", "not none", paths=(passes,)))
stages.LONG = (
    stages.Tests("third", "not none", paths=(passes,), folders=("tests",)),
    stages.Tests("fourth", "not none", needs=("the moon",), folders=("tests",)),
)
stages.content_of = lambda stage: "content"
for limited in (True, False):
    code = stages.run_tier(limited=limited)
    print(code, sorted(json.loads(stages.PASSED.read_text())))
"""


@pytest.mark.acceptance
def test_a_tier_ends_with_one_summary_names_what_did_not_run_and_only_a_person_notes_what_passed(
    tmp_path: Path,
) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", LOAD + TIER]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    last = [number for number, line in enumerate(lines) if line in ("0 []", "0 ['third']")]
    assert len(last) == 2, done.stdout
    for number in last:
        assert re.fullmatch(r"2 passed in [\d.]+s \(0:00:\d\d\)", lines[number - 1])
    assert lines.count("| fourth | not run: needs the moon, which can't be reached | | |") == 2
    assert {"first", "second", "third"} <= set(json.loads((tmp_path / "reports" / "durations.json").read_text()))


CUT_OFF = """
stages.CORE = (
    stages.Command("in time", ("true",)),
    stages.Tests("{name}", "not none", paths=("tests/test_slow.py",)),
    stages.Command("too late", ("sleep", "60")),
)
stages.LONG = ()
stages.CORE_END_S = 10.0  # pytest has begun by then on a machine that is busy, too
stages.read_passed = dict
print(stages.run_tier(limited=True))
"""


@pytest.mark.parametrize(("first", "code"), [("assert True", 0), ("assert False", 1)])
def test_the_core_is_cut_off_before_cis_time_ends_and_what_failed_until_then_counts(
    first: str, code: int, tmp_path: Path
) -> None:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    slow = f"import time\ndef test_first():\n    {first}\ndef test_second():\n    time.sleep(60)\n"
    (tmp_path / "tests" / "test_slow.py").write_text(slow)
    command = [sys.executable, "-c", LOAD + CUT_OFF.format(name="slow")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str(code), done.stdout
    assert "| in time | passed |" in done.stdout
    assert "| slow | FAILED |" in done.stdout if code else "| slow | not run: cut off after" in done.stdout
    assert "| too late | not run: cut off after" in done.stdout
