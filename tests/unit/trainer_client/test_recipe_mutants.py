"""No change of one line of a recipe, an estimator or a loss survives the tests that compute them."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from .equal_mutants import EQUAL
from .recipes_mutants import FIGURES, digest, modules, mutants

ROOT = Path(__file__).parents[3]
COMMAND = f"{__package__}.recipes_mutants"


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_no_change_of_one_line_survives() -> None:
    """250 CPU seconds: some 1,700 changes, each with the tests that reach its line."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", COMMAND]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_the_page_is_of_todays_code_and_no_change_survived() -> None:
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    sources = {name: Path(str(module.__file__)).read_text(encoding="utf-8") for name, module in modules().items()}
    changed = [name for name, source in sources.items() if figures.get(name, {}).get("source") != digest(source)]
    assert not changed, f"run: python -m {COMMAND} --write {' '.join(changed)} && python scripts/mutants_page.py"
    assert figures.keys() == sources.keys()
    assert not [one for each in figures.values() for one in each["alive"]]
    page = runpy.run_path(str(ROOT / "scripts" / "mutants_page.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["page"]()


def test_every_equal_change_is_one_that_is_made() -> None:
    named = {name for name, *_ in EQUAL}
    made = {
        mutant.key
        for name, module in modules(sorted(named)).items()
        for mutant in mutants(name, Path(str(module.__file__)).read_text(encoding="utf-8"))
    }
    assert EQUAL.keys() <= made
