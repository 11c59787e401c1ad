"""Takes the harness stage's report into harnesses/tested.json, and writes the tables of docs/harnesses.md.

    make test-harnesses && python scripts/harnesses_page.py

A run that the report holds takes the place of the former one; the others, and former releases, stay with their day.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rolltap.errors import TaskInvalid
from rolltap.harnesses.agents.registry import HARNESSES, TABLE, get_harness, release_results, stage_results
from rolltap.harnesses.base import Harness

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "reports" / "harnesses.json"
TESTED = ROOT / "harnesses" / TABLE
PAGE = ROOT / "docs" / "harnesses.md"
DIALECTS = ("openai_chat", "openai_responses", "anthropic", "gemini")
MATRIX = ("basic", "long", "parallel", "resume", "429", "500", "dropped", "subagent", "compaction")
"""The scenarios that are columns of the matrix."""


def merged(report: Mapping[str, Any]) -> dict[str, Any]:
    """What was tested, with the report's runs."""
    day = time.strftime("%Y-%m-%d", time.gmtime(report["at"]))
    tested: dict[str, Any] = json.loads(TESTED.read_text(encoding="utf-8")) if TESTED.exists() else {}
    for cell in report["cells"]:
        result = {"day": day, "passed": cell["passed"], "shown": _shown(cell), "log": cell["check"]}
        runs = tested.setdefault(cell["harness"], {}).setdefault(cell["release"], {})
        runs[f"{cell['dialect']} {cell['scenario']}"] = result
    return {name: tested[name] for name in HARNESSES if name in tested}


def _shown(cell: Mapping[str, Any]) -> str:
    """`bridged/continuations`, and the breaks."""
    breaks = ", ".join(f"{count} {reason}" for reason, count in sorted(cell["breaks"].items()))
    return f"{cell['bridged']}/{max(0, cell['main'] - 1)} {breaks}".strip()


def releases() -> str:
    """The list of harnesses, each with the releases that ran; the pinned one is bold."""
    days = Counter(tested.day for name in HARNESSES for tested in release_results(name))
    usual = max(days, key=lambda day: (days[day], day))
    lines = "\n".join(_releases(name, usual) for name in HARNESSES)
    return f"{lines}\n\nThe number of runs that went as expected is of {usual}, except where a date is given."


def _releases(name: str, usual: str) -> str:
    harness = HARNESSES[name]
    package = harness.package
    assert package is not None
    source = "npm" if package.manager == "npm" else "PyPI"
    if package.node > 20:
        source += f", Node {package.node}"
    if package.python > (3, 11):
        source += f", Python {package.python[0]}.{package.python[1]}"
    others = [dialect for dialect in DIALECTS if dialect != harness.dialect and _speaks(harness, dialect)]
    protocols = harness.dialect + (f" ({', '.join(others)})" if others else "")
    tested = release_results(name)
    names = [f"**{one.release}**" if one.release == package.version else one.release for one in tested]
    results = [one.result + ("" if one.day == usual else f" ({one.day})") for one in tested]
    return f"* {name}: `{package.name}` {', '.join(names)} ({source}); {', '.join(results)}; {protocols}"


def _speaks(harness: Harness, dialect: str) -> bool:
    try:
        return get_harness(harness.name, dialect=dialect).dialect == dialect
    except TaskInvalid:
        return False


def matrix() -> str:
    """A line for each harness and protocol: scenarios that were bridged in full, then the others with their breaks."""
    lines = []
    for name, harness in HARNESSES.items():
        assert harness.package is not None
        runs = stage_results().get(name, {}).get(harness.package.version, {})
        for dialect in DIALECTS:
            cells = {scenario: run for scenario in MATRIX if (run := runs.get(f"{dialect} {scenario}"))}
            if len(cells) > 1:
                said = [", ".join(scenario for scenario, run in cells.items() if _is_whole(run))]
                said += [f"{scenario} {_cell(run)}" for scenario, run in cells.items() if not _is_whole(run)]
                if logs := {run["log"] for run in cells.values() if run["log"] != "match"}:
                    said.append(f"log {', '.join(sorted(logs))}")
                lines.append(f"* {name} ({dialect}): {'; '.join(said)}")
    return "\n".join(lines)


def _is_whole(run: Mapping[str, Any]) -> bool:
    bridged, _, continuing = run["shown"].partition("/")
    return bool(run["passed"]) and bridged == continuing


def _cell(run: Mapping[str, Any]) -> str:
    return str(run["shown"]) if run["passed"] else f"{run['shown']}, failed"


def page() -> str:
    """The page's text, with its tables as they are made from what was tested."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("releases", releases()), ("harness_matrix", matrix())):
        block = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        text = block.sub(lambda marks, table=table: f"{marks[1]}{table}\n{marks[2]}", text)
    return text


def main() -> None:
    if REPORT.exists():
        tested = merged(json.loads(REPORT.read_text(encoding="utf-8")))
        TESTED.write_text(json.dumps(tested, indent=1) + "\n", encoding="utf-8")
        stage_results.cache_clear()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
