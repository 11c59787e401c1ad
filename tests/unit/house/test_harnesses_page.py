"""docs/harnesses.md says which releases ran, as the stage's results do; those of the definitions are among them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from rolltap.harnesses.agents.registry import HARNESSES, release_results

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_results_say() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "harnesses_page.py"))
    assert (ROOT / "docs" / "harnesses.md").read_text(encoding="utf-8") == made["page"]()


@pytest.mark.parametrize("name", HARNESSES)
def test_the_release_of_a_recipe_ran_as_expected(name: str) -> None:
    package = HARNESSES[name].package
    assert package is not None
    (tested,) = [one for one in release_results(name) if one.release == package.version]
    assert tested.passed == tested.runs > 0
