"""The report of the matrix harness x family, `reports/families.json`, and the grid that pages and terminals show."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rolltap import __version__

from .families import FAMILIES, Family
from .recorded import RECORDED
from .vocabularies import is_own

REPORT = Path(__file__).parents[2] / "reports" / "families.json"
IDENTITY = ("harness", "release", "family", "thinking", "compacts")
"""What tells cells apart. A recorded shape has no release."""

Cell = Mapping[str, Any]


def write_report(cells: Iterable[Cell]) -> list[str]:
    """Takes a run's cells into the report, each in the place of its former result; returns the grid's lines.

    What other versions of the packages have measured does not stay.
    """
    about = {name: version(name) for name in ("renderers", "trl", "tokenizers")}
    about |= {"rolltap": __version__, "python": platform.python_version()}
    former = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else {}
    kept = former.get("cells", ()) if former.get("versions") == about else ()
    merged = {tuple(cell[key] for key in IDENTITY): cell for cell in (*kept, *cells)}
    whole = list(merged.values())
    report = {
        "versions": about,
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "sampling": "each token split in two at a place that is drawn with the reply's length as seed",
        "counts": counts(whole),
        "grid": grid(whole),
        "generated": generated(whole),
        "cells": whole,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return lines(report)


def counts(cells: Sequence[Cell]) -> dict[str, int]:
    """What the cells come to, those of real releases and those of recorded shapes."""
    proofs = [cell["proof"] for cell in cells if cell["proof"] is not None]
    return {
        "cells": len(cells),
        "real": sum(bool(cell["release"]) for cell in cells),
        "failed": sum(bool(cell["failures"]) for cell in cells),
        "violations": sum(len(proof["violations"]) for proof in proofs),
        **{key: sum(proof[key] for proof in proofs) for key in ("calls", "continuing", "bridged", "trained_tokens")},
    }


def generated(cells: Sequence[Cell]) -> dict[str, dict[str, int]]:
    """What the generated conversations of each kind come to."""
    kinds = dict.fromkeys(cell["harness"] for cell in cells if cell.get("generated"))
    return {kind: counts([cell for cell in cells if cell["harness"] == kind]) for kind in kinds}


def grid(cells: Sequence[Cell]) -> list[list[str]]:
    """The head and a row for each family; a column for each harness."""
    head = ["family", "rendered by", "vocabulary", *RECORDED]
    rows = []
    for family in FAMILIES.values():
        of_family = [cell for cell in cells if cell["family"] == family.name]
        if of_family:
            columns = [_shown([cell for cell in of_family if cell["harness"] == name], family) for name in RECORDED]
            name = family.name.removesuffix(" (template)")
            rows.append([name, family.by.partition(":")[0], _vocabulary(family), *columns])
    return [head, *rows]


def _shown(cells: Sequence[Cell], family: Family) -> str:
    """Prompts bridged and prompts that continue, over a harness's cells; in brackets where no real release ran."""
    real = [cell for cell in cells if cell["release"]]
    chosen = real or cells
    if not chosen:
        return ""
    failed = next((cell for cell in chosen if cell["failures"]), None)
    if failed is not None:
        return "**failed**" if real else "(**failed**)"
    proofs = [cell["proof"] for cell in chosen]
    text = f"{sum(proof['bridged'] for proof in proofs)}/{sum(proof['continuing'] for proof in proofs)}"
    text += "" if any(cell["ran"] for cell in chosen) or not family.tools else " text"
    return text if real else f"({text})"


def _vocabulary(family: Family) -> str:
    return "its own" if is_own(family) else f"{family.vocabulary} under its special tokens"


def lines(report: Mapping[str, Any]) -> list[str]:
    """The grid and the failures, for a terminal."""
    table: list[list[str]] = report["grid"]
    shown = [[row[0], *row[3:]] for row in table]
    widths = [max(len(row[at]) for row in shown) for at in range(len(shown[0]))]
    out = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    failed = [cell for cell in report["cells"] if cell["failures"]]
    out += [f"{cell['harness']} on {cell['family']}: {cell['failures'][0][:300]}" for cell in failed]
    return [*out, ", ".join(f"{name} {count}" for name, count in report["counts"].items())]
