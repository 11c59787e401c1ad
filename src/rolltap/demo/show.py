"""What the demo prints and draws: progress bars, the reward curve, the table of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from rolltap.reading.intervals import wilson

BLOCKS = "▁▂▃▄▅▆▇█"


def progress_bars(console: Console) -> Progress:
    """Progress bars, each with a text behind it."""
    return Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Values between 0 and 1 as one line of at most `width` blocks; neighbours are averaged."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(mean * len(BLOCKS)))] for mean in means)


def plot(curves: dict[int, Sequence[float]], results: Sequence[dict[str, Any]], path: Path) -> None:
    """The mean reward of every training step, a line a seed, with the held-out success before and after."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (seed, curve), result in zip(curves.items(), results, strict=True):
        (line,) = axes.plot(range(1, len(curve) + 1), curve, label=f"seed {seed}", linewidth=1.5)
        ends = [result["success_before"], result["success_after"]]
        axes.plot([0, len(curve) + 1], ends, "o", color=line.get_color(), markersize=7)
    axes.set(xlabel="training step", ylabel="success", ylim=(-0.02, 1.02))
    axes.set_title("Success on training tasks by step; dots: held-out tasks, before and after", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def share(success: float, n: int) -> str:
    """A success rate with its 95% interval: `0.92 (0.83 to 0.97)`."""
    low, high = wilson(success, n)
    return f"{success:.2f} ({low:.2f} to {high:.2f})"


def closing_table(report: dict[str, Any]) -> Table:
    """The figures of the demo's report as a table."""
    table = Table(
        title="rolltap demo; in brackets: 95% intervals", show_header=False, title_justify="left", title_style="bold"
    )
    for run in report["runs"]:
        n = run["held_out"]
        before, after = share(run["success_before"], n), share(run["success_after"], n)
        label = f"seed {run['seed']}: success on {n} held-out tasks"
        table.add_row(label, f"{before} → {after}; {run['cpu_seconds']:.0f} CPU s")
    kept = report["kept_tokens"] / report["sampled_tokens"] if report["sampled_tokens"] else 0.0
    breaks = ", ".join(f"{reason} {count}" for reason, count in report["breaks"].items()) or "none"
    table.add_row("calls recorded", f"{report['calls']:,}")
    table.add_row("tokens sampled, kept for training", f"{report['sampled_tokens']:,}, {kept:.1%}")
    table.add_row("training rows", f"{report['rows']:,}; {report['merges']:,} calls merged into an earlier one's row")
    table.add_row("breaks", breaks)
    table.add_row("weight versions on the tokens", f"0 to {report['weight_versions']}")
    table.add_row("seconds", f"{report['seconds']:.0f}")
    return table
