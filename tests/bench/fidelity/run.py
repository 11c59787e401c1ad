"""The fidelity table: `python -m tests.bench.fidelity.run`. Writes reports/fidelity.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from rolltap.errors import InvalidRequest
from rolltap.proxy.continuation.rendering import HistoryThinking

sys.path.insert(0, str(Path(__file__).parent))

from families import FAMILIES, Family, images_of, renderer
from shapes import SHAPES, TOOLS, Driver, Tally
from writing import writer

ROOT = Path(__file__).parents[3]


def measure(family: Family, seed: int, history: HistoryThinking) -> dict[str, Tally]:
    """Every shape's tally for one family."""
    token_renderer = renderer(family)
    out: dict[str, Tally] = {}
    for name, shape in SHAPES.items():
        thought = "so" if family.always_thinks else ""
        tools = TOOLS if family.tools else ()
        write = writer(token_renderer, tools, seed)
        images = images_of(token_renderer)
        driver = Driver(token_renderer, write, history=history, thought=thought, tools=family.tools, images=images)
        try:
            shape(driver)
        except InvalidRequest as error:
            driver.tally.refused = str(error)
        out[name] = driver.tally
    return out


def row(family: Family, tallies: dict[str, Tally]) -> dict:
    total = list(tallies.values())
    breaks = sum((Counter(tally.breaks) for tally in total), Counter())
    return {
        "family": family.name,
        "by": f"renderers:{family.renderer}" if family.renderer else "template",
        "note": family.note,
        "turns": sum(tally.turns for tally in total),
        "unaltered": sum(tally.unaltered for tally in total),
        "bridged": sum(tally.bridged for tally in total),
        "rerendered_exact": sum(tally.rerendered_exact for tally in total),
        "violations": sum(tally.violations for tally in total),
        "breaks": dict(breaks),
        "shapes": {
            name: {"turns": t.turns, "bridged": t.bridged, "breaks": dict(t.breaks), "refused": t.refused}
            for name, t in tallies.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--history", choices=("keep", "tool_cycle"), default="keep", help="policy for history thinking")
    parser.add_argument("--only", help="one family's name")
    options = parser.parse_args()
    rows = []
    chosen = [family for family in FAMILIES if options.only in (None, family.name)]
    for family in track(chosen, "families", console=Console(stderr=True)):
        rows.append(row(family, measure(family, options.seed, options.history)))
    table = Table(
        "family", "bridged by", "turns", "bridged", "plain re-rendering", "violations", "breaks", title="Fidelity"
    )
    for one in rows:
        share = f"{one['bridged']}/{one['turns']}"
        breaks = ", ".join(f"{reason} {count}" for reason, count in one["breaks"].items())
        table.add_row(
            one["family"], one["by"], str(one["turns"]), share,
            f"{one['rerendered_exact']}/{one['turns']}", str(one["violations"]), breaks,
        )  # fmt: skip
    Console().print(table)
    report = {
        "rows": rows,
        "seed": options.seed,
        "history_thinking": options.history,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "renderers": version("renderers"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    (ROOT / "reports").mkdir(exist_ok=True)
    (ROOT / "reports" / "fidelity.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
