"""Writes docs/notes/mutations.md from what the last trial of changes found: `python scripts/mutants_page.py`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "notes" / "mutations.md"
FIGURES = ROOT / "tests" / "unit" / "trainer_client" / "mutants.json"

HEAD = """# Changes of one line that the tests of recipes notice

A tool changes one operator, condition, number or statistic at a time, or leaves a term, an argument or a condition out,
in every function of the recipes, the estimators, the step that they see and the losses (Tinker's, too), and runs the
tests of `make test` that reach its line. A change is noticed if a test fails or takes more than its limit of CPU time.
Options' defaults are held by [the page of recipes](../recipes.md).

`python -m tests.unit.trainer_client.recipes_mutants --write && python scripts/mutants_page.py` makes this page. The
stage `recipes` tries all changes again (250 CPU seconds); `make test` fails where the code is not what was tried.

"""


def page() -> str:
    """The page's text."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    noticed = {name: one["noticed"] + one["limit"] for name, one in figures.items()}
    equal = [(name, text) for name, one in figures.items() for text in one["equal"]]
    alive = [(name, text) for name, one in figures.items() for text in one["alive"]]
    whole = ", ".join(f"`{name}`" for name, count in noticed.items() if not count)
    total = sum(noticed.values())
    return (
        f"{HEAD}Of {total + len(equal) + len(alive)} changes {total} are noticed and {len(equal)} change nothing, for "
        f"reasons that `tests/unit/trainer_client/mutants.json` has. {len(alive)} survive{':' if alive else '.'}\n"
        + "".join(f"* `{name}`: {text}\n" for name, text in alive)
        + f"\nWithout changes, as settings of another recipe: {whole}.\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
