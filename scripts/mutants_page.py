"""Writes docs/notes/mutations.md from what the last trial of changes found: `python scripts/mutants_page.py`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "notes" / "mutations.md"
FIGURES = ROOT / "tests" / "unit" / "trainer_client" / "mutants.json"

HEAD = """# Changes of one line that the tests of recipes notice

A tool changes one operator, condition, number or statistic at a time in every function of the recipes, the estimators
and the losses, and runs the tests of `make test` that reach its line. `noticed`: a test fails, or the change takes more
than its limit of CPU time. `equal`: the change changes nothing, with the reason below. A recipe without changes is
settings of another one. Options' defaults and settings are on [the page of recipes](../recipes.md), whose test notices
a change.

`python -m tests.unit.trainer_client.recipes_mutants --write && python scripts/mutants_page.py` makes this page. The
stage `recipes` tries all changes again (90 CPU seconds), and `make test` fails where the code is not what was tried.

"""


def page() -> str:
    """The page's text."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    rows, reasons, total = [], [], [0, 0, 0, 0]
    for name, one in figures.items():
        noticed, equal, alive = one["noticed"] + one["limit"], len(one["equal"]), len(one["alive"])
        counts = [noticed + equal + alive, noticed, equal, alive]
        total = [a + b for a, b in zip(total, counts, strict=True)]
        rows.append(f"| `{name}` | {' | '.join(map(str, counts))} |")
        reasons += [f"| `{name}` | {text.replace('|', chr(92) + '|')} |" for text in one["equal"]]
    columns = "| module | changes | noticed | equal | survive |\n|---|---|---|---|---|\n"
    whole = "\n".join([*rows, f"| all | {' | '.join(map(str, total))} |"])
    return (
        f"{HEAD}{columns}{whole}\n\n## Equal\n| module | change and reason |\n|---|---|\n" + "\n".join(reasons) + "\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
