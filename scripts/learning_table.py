"""The table of docs/notes/recipes.md that shows what recipes learned, from tests/learning/results.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS = "| tasks | recipe | seeds | before | after | control after | lead over the control | lead over `grpo` |\n"

STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's t for 95%, two-sided, by degrees of freedom. For more than ten the last is a little wide."""

SEEDS, MORE_SEEDS = 3, 5
"""The seeds of a row, and of one that these do not decide. A row shows the one or the other: whoever looks after each
seed, and stops once 0 is outside the interval, finds a lead where there is none."""

LEFT_OUT = {
    "skill_sd": "its teacher, the policy with the hint, does no better than the policy without it on these tasks, so "
    "what its runs show is GRPO's part of the loss"
}
"""Recipes whose runs can't show what the recipe adds, and why."""


def learning(results: Mapping[str, Any]) -> str:
    """What was measured; recipes that did not beat their control are named, with their seeds."""
    rows = list(_rows(results))
    if not rows:
        return "Nothing has been measured yet.\n"
    open_, behind = (
        ", ".join(
            f"`{row['method']}` on `{row['family']}` ({row['seeds']} seeds)" for row in rows if which(row["lead"])
        )
        for which in (_is_undecided, lambda lead: lead[0] + lead[1] < 0)
    )
    table = "\n".join(_line(row) for row in rows)
    steps = results["cells"][0]["steps"]
    beaten = " ".join(
        said
        for said in (
            open_ and f"Undecided, as 0 is in the interval: {open_}; fewer than {MORE_SEEDS} seeds are too few.",
            behind and f"Behind the control: {behind}.",
            "" if open_ or behind else "Each of these beats its control.",
        )
        if said
    )
    size = f"{steps} steps of {results['groups']} groups of {results['rollouts']} rollouts"
    done, planned = len(results["cells"]), results["planned"]
    missing = f"{done} of {planned} runs are measured, controls counted; the others have not run."
    measured = missing if done < planned else f"{done} runs are measured, controls counted."
    held_out = f"{results['held_out']} held-out rollouts a seed at temperature {results['temperature']:g}"
    days = sorted({one["time"] for one in results["cells"]})
    machine = f"{results['cores']} cores, Python {results['python']}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"
    methods = {one["method"] for one in results["cells"]}
    absent = " ".join(
        f"`{name}` was measured and is left out: {why}." for name, why in LEFT_OUT.items() if name in methods
    )
    note = " ".join(filter(None, (beaten, absent, measured, f"{size}; {held_out}.", f"({machine}.)")))
    return f"{COLUMNS}|---|---|---|---|---|---|---|---|\n{table}\n\n{note}\n"


def _rows(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One of each family and recipe, over the seeds that have both the run and its control."""
    cells = {(one["family"], one["method"], one["seed"], one["shuffled"]): one for one in results["cells"]}
    for family, method in dict.fromkeys(key[:2] for key in sorted(cells)):
        if method in LEFT_OUT:
            continue
        own = [one for key, one in cells.items() if key[:2] == (family, method) and not key[3]]
        pairs = [(one, other) for one in own if (other := cells.get((family, method, one["seed"], True)))]
        if not pairs:
            continue
        if SEEDS < len(pairs) < MORE_SEEDS:
            pairs = pairs[:SEEDS]
        plain = [(one, other) for one, _ in pairs if (other := cells.get((family, "grpo", one["seed"], False)))]
        if SEEDS < len(plain) < MORE_SEEDS:
            plain = plain[:SEEDS]
        after, control = (sum(pair[at]["after"] for pair in pairs) / len(pairs) for at in (0, 1))
        yield {
            "family": family, "method": method, "seeds": len(pairs), "after": after,
            "control": control,
            "before": sum(one["before"] for one, _ in pairs) / len(pairs), "lead": _paired(pairs),
            "over_grpo": _paired(plain) if method != "grpo" else None,
        }  # fmt: skip


def _paired(pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> tuple[float, float] | None:
    """The mean lead over the seeds, and half of its 95% interval: what training runs of different seeds differ by."""
    leads = [one["after"] - other["after"] for one, other in pairs]
    if not leads:
        return None
    deviation = statistics.stdev(leads) if len(leads) > 1 else 0.0
    half = (
        math.inf if len(leads) == 1 else STUDENT[min(len(leads), len(STUDENT)) - 1] * deviation / math.sqrt(len(leads))
    )
    return statistics.fmean(leads), half


def undecided(results: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The family and recipe of each row that its first `SEEDS` seeds do not decide, over the control or over `grpo`;
    with a lead over `grpo` also that row."""
    rows = list(_rows({"cells": [one for one in results["cells"] if one["seed"] < SEEDS]}))
    beside = [row for row in rows if row["over_grpo"] is not None and _is_undecided(row["over_grpo"])]
    alone = [row for row in rows if _is_undecided(row["lead"])]
    open_ = [(row["family"], row["method"]) for row in (*alone, *beside)]
    return list(dict.fromkeys([*open_, *((row["family"], "grpo") for row in beside)]))


def _is_undecided(lead: tuple[float, float]) -> bool:
    return abs(lead[0]) <= lead[1]


def _shown(lead: tuple[float, float] | None) -> str:
    if lead is None:
        return ""
    return f"{lead[0]:+.2f} ± {lead[1]:.2f}{', undecided' if _is_undecided(lead) else ''}"


def _line(row: Mapping[str, Any]) -> str:
    leads = f"{_shown(row['lead'])} | {_shown(row['over_grpo'])}"
    numbers = f"{row['before']:.2f} | {row['after']:.2f} | {row['control']:.2f} | {leads}"
    return f"| `{row['family']}` | `{row['method']}` | {row['seeds']} | {numbers} |"
