"""What a change costs: `python -m tests.bench.bench_pairs OTHER`, where OTHER is another checkout of the repository.

`rolltap serve` of both runs behind one canned engine, on the same core. Each round measures both, and which comes first
alternates. A table has the median of the rounds' ratios, this checkout's figure over the other's, and its
standard error: a difference within two of those is noise. With this checkout as OTHER it shows the noise alone.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .bench_proxy import CELLS, Figures, measure_cell
from .fidelity.families import MATRIX, model_folder
from .proxies import OTHER_CORES, Launcher

HERE = Path(__file__).resolve().parents[2]
MEASURES = ("cpu_s_per_1000", "calls_per_s", "p50_ms", "p99_ms", "first_ms", "gap_p99_ms", "rss_mb")
CELL_NAMES = [cell.name for cell in CELLS]


def median_and_error(ratios: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error, by that of the mean of normal values."""
    spread = statistics.stdev(ratios) if len(ratios) > 1 else math.nan
    return statistics.median(ratios), math.sqrt(math.pi / 2) * spread / math.sqrt(len(ratios))


async def measure(launcher: Launcher, arguments: argparse.Namespace, console: Console) -> dict[str, list[Figures]]:
    engine = await launcher.engine()
    targets = []
    for name, checkout in (("this", HERE), ("other", arguments.other.resolve())):
        store = {"url": f"sqlite:///{launcher.folder}/{name}.db"}
        targets.append(await launcher.rolltap(name, engine.url, store, checkout=checkout))
    figures: dict[str, list[Figures]] = {"this": [], "other": []}
    cell = CELLS[CELL_NAMES.index(arguments.cell)]
    with Progress(console=console, transient=True) as progress:
        for number in progress.track(range(arguments.rounds + 1), description="rounds"):
            for target in targets if number % 2 else reversed(targets):
                measured = await measure_cell(target, engine, cell)
                if number:  # the first round warms up
                    figures[target.name].append(measured)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of this repository")
    parser.add_argument("--cell", choices=CELL_NAMES, default="c64")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    console, qwen3 = Console(), MATRIX["qwen3"]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        launcher = Launcher(stack, Path(folder), model_folder(qwen3), "qwen3")
        os.sched_setaffinity(0, OTHER_CORES)
        figures = uvloop.run(measure(launcher, arguments, console))
    table = Table(arguments.cell, "this", "other", "this / other")
    for measure_name in MEASURES:
        this, other = ([getattr(each, measure_name) for each in figures[name]] for name in ("this", "other"))
        ratios = [ours / theirs for ours, theirs in zip(this, other, strict=True) if theirs > 0]
        if not ratios:  # of streams alone
            continue
        median, error = median_and_error(ratios)
        ratio = f"{median:.3f} ± {error:.3f}"
        table.add_row(measure_name, f"{statistics.median(this):,.2f}", f"{statistics.median(other):,.2f}", ratio)
    console.print(table)
    for name, rounds in figures.items():
        if errors := [each.errors for each in rounds if each.errors]:
            console.print(f"errors: {name}: {errors}")


if __name__ == "__main__":
    main()
