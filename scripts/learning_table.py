"""The table of docs/recipes.md that shows what recipes learned, from tests/learning/results.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS = (
    "| tasks | recipe | seeds | minutes | before | after | control after | lead over the control | by training step |\n"
)


def learning(results: Mapping[str, Any]) -> str:
    """What was measured; recipes that did not beat their control are named."""
    rows = list(_rows(results))
    if not rows:
        return "Nothing has been measured yet.\n"
    failed = [f"`{row['method']}` on `{row['family']}`" for row in rows if row["lead"] - row["half"] <= 0]
    table = "\n".join(_line(row) for row in rows)
    steps = results["cells"][0]["steps"]
    beaten = (
        f"No lead over the control is shown for {', '.join(failed)}." if failed else "Each of these beats its control."
    )
    size = f"{steps} steps of {results['groups']} groups of {results['rollouts']} rollouts"
    done, planned = len(results["cells"]), results["planned"]
    missing = f"{done} of {planned} runs are measured, controls counted; the others have not run."
    measured = missing if done < planned else f"{done} runs are measured, half of them controls."
    held_out = f"{results['held_out']} held-out rollouts a seed at temperature {results['temperature']:g}"
    machine = f"{results['cores']} cores, Python {results['python']}, {results['time']}"
    note = f"{beaten} {measured} {size}; {held_out}. ({machine}.)"
    return f"{COLUMNS}|---|---|---|---|---|---|---|---|---|\n{table}\n\n{note}\n"


def _rows(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One of each family and recipe, over the seeds that have both the run and its control."""
    cells = {(one["family"], one["method"], one["seed"], one["shuffled"]): one for one in results["cells"]}
    for family, method in dict.fromkeys(key[:2] for key in sorted(cells)):
        own = [one for key, one in cells.items() if key[:2] == (family, method) and not key[3]]
        pairs = [(one, other) for one in own if (other := cells.get((family, method, one["seed"], True)))]
        if not pairs:
            continue
        count = len(pairs) * results["held_out"]  # rollouts: the jobs of one aren't independent
        after, control = (sum(pair[at]["after"] for pair in pairs) / len(pairs) for at in (0, 1))
        yield {
            "family": family, "method": method, "seeds": len(pairs), "after": after,
            "minutes": statistics.median(one["seconds"] for one, _ in pairs) / 60, "control": control,
            "before": sum(one["before"] for one, _ in pairs) / len(pairs), "lead": after - control,
            "half": 1.96 * math.sqrt((after * (1 - after) + control * (1 - control)) / count),
            "curve": _mean([one["curve"] for one, _ in pairs]),
        }  # fmt: skip


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*curves, strict=False)]


def _line(row: Mapping[str, Any]) -> str:
    shown = " ".join(f"{value:.2f}" for value in row["curve"])
    lead = f"{row['lead']:+.2f} ± {row['half']:.2f}"
    numbers = f"{row['minutes']:.1f} | {row['before']:.2f} | {row['after']:.2f} | {row['control']:.2f} | {lead}"
    return f"| `{row['family']}` | `{row['method']}` | {row['seeds']} | {numbers} | {shown} |"
