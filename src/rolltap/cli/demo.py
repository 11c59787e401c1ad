"""`rolltap demo`: runs the demo, shows its progress, and writes its report."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from rolltap.cli.doctor import missing_modules
from rolltap.cli.export import ExportJob, run_export
from rolltap.cli.screen import Screen
from rolltap.demo.learn import (
    MEASURED_AT,
    PENALISED,
    POLICIES,
    POLICY,
    DemoRecipe,
    SeedResult,
    SeedRunner,
    ShuffledRewards,
)
from rolltap.demo.stack import DemoFailed, Stack
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.reading.runs import wilson
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.dataset import Query
from rolltap.reconstructor.exporters.where import parse_where
from rolltap.reconstructor.rules import session_rules

MARKER = ".rolltap-demo"
"""The file by which the demo knows a folder as its own."""

MADE = ("data", "dataset", "train", "rolltap.toml", "reward.png", "report.json", MARKER)
"""What the demo writes into its folder and removes again, besides its processes' logs and a folder for each seed."""


def run(*, seeds: list[int], out: Path, recipe: DemoRecipe, shuffle_rewards: bool, report: Path | None = None) -> None:
    """Runs every seed and prints the results. `report` defaults to `report.json` in `out`."""
    console = Screen()
    check_installation()
    from rolltap.trainer_client.recipes import recipe_class

    recipe_class(recipe.recipe)  # a typo is told before anything is made
    prepare_folder(out)
    for name in ("rolltap", "litellm_model"):
        logging.getLogger(name).setLevel(logging.ERROR)
    results: list[SeedResult] = []
    records: list[dict[str, Any]] = []
    for seed in seeds:
        folder = out / f"seed-{seed}" if len(seeds) > 1 else out
        folder.mkdir(exist_ok=True)
        started = _cpu_seconds()
        result = _run_seed(console, folder, recipe, seed, shuffle_rewards)
        result.cpu_seconds = _cpu_seconds() - started
        results.append(result)
        records.append(_record(console, folder))
    figures = _report(recipe, results, records, shuffle_rewards)
    plot({f"seed {result.seed}": result.curve for result in results}, figures["runs"], out / "reward.png")
    report = report or out / "report.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    for result in results:
        console.print(f"seed {result.seed}  reward by step  {sparkline(result.curve)}")
    console.print(closing_table(figures))
    first = out / f"seed-{seeds[0]}" if len(seeds) > 1 else out
    console.print(f"database  {first}/data/rolltap.db\ndataset   {first}/dataset\nplot      {out}/reward.png")
    console.print(f"report    {report}")


def check_installation() -> None:
    """`ConfigError` if a package or the tiny model is missing."""
    missing = [name for extra in ("tokens", "train", "demo", "export") for name in missing_modules(extra)]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}: {install_line('demo')}")
    if not (FOLDER / "model.safetensors").exists():
        raise ConfigError(f"the tiny model is missing; make it with `python -m rolltap.engine.tiny.make {FOLDER}`")


def prepare_folder(out: Path) -> None:
    """Makes `out` an empty folder. Removes an earlier demo's output; `ConfigError` if anything else is in it."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder; choose another one with --out")
    entries = sorted(out.iterdir()) if out.exists() else []
    own = (out / MARKER).exists()
    foreign = [entry.name for entry in entries if not (own and _is_made_by_demo(entry.name))]
    if foreign:
        raise ConfigError(f"{out} holds files that no demo wrote, {foreign[0]!r} among them: choose another --out")
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).touch()


def _is_made_by_demo(name: str) -> bool:
    return name in MADE or name.endswith(".log") or re.fullmatch(r"seed-\d+", name) is not None


def _cpu_seconds() -> float:
    """CPU time of this process and of the children that it has waited for."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _run_seed(console: Screen, folder: Path, recipe: DemoRecipe, seed: int, shuffle: bool) -> SeedResult:
    label = " (control: rewards shuffled)" if shuffle else ""
    console.print(f"seed {seed}{label}: mini-swe-agent, unmodified, on small file-system tasks")
    with progress_bars(console) as bars, Stack(folder.absolute(), FOLDER, POLICIES) as stack:
        tasks = {
            "before": bars.add_task("held-out tasks before", total=recipe.held_out, note=""),
            "train": bars.add_task("training steps", total=recipe.steps, note="", start=False),
            "after": bars.add_task("held-out tasks after", total=recipe.held_out, note="", start=False),
        }

        def note(part: str, done: int, text: str) -> None:
            bars.start_task(tasks[part])
            bars.update(tasks[part], completed=done, note=text)

        runner = SeedRunner(stack, recipe, seed, ShuffledRewards(seed) if shuffle else None, note)
        try:
            return asyncio.run(runner.run())
        except* DemoFailed as failed:
            raise failed.exceptions[0] from None


def _record(console: Screen, folder: Path) -> dict[str, Any]:
    """Exports the record of the trained policy, as `rolltap export` would; returns the reconstruction report."""
    job = ExportJob(
        store=f"sqlite:///{(folder / 'data' / 'rolltap.db').absolute()}",
        out=folder / "dataset",
        exporter=exporter_named("trajectories", {}),
        query=Query(where=parse_where([f"policy={POLICY}"]), train={POLICY: PENALISED}),
        rules=lambda session: session_rules(session, PENALISED),
    )
    with console.status("reading the record back"):
        return asyncio.run(run_export(job))["reconstruction"]


def _report(
    recipe: DemoRecipe, results: list[SeedResult], records: list[dict[str, Any]], shuffled: bool
) -> dict[str, Any]:
    breaks: Counter[str] = Counter()
    for record in records:
        breaks.update(record["breaks_by_reason"])
    fields = {
        "calls": "calls",
        "sampled_tokens": "sampled_tokens",
        "kept_tokens": "trained_tokens",
        "rows": "rows",
        "merges": "merged_calls",
    }
    counts = {name: sum(record[field] for record in records) for name, field in fields.items()}
    return {
        "seeds": [result.seed for result in results],
        "success_before": [result.success_before for result in results],
        "success_after": [result.success_after for result in results],
        "interval_before": [wilson(result.success_before, result.held_out) for result in results],
        "interval_after": [wilson(result.success_after, result.held_out) for result in results],
        "seconds": sum(result.seconds for result in results),
        "cpu_seconds": sum(result.cpu_seconds for result in results),
        **counts,
        "breaks": dict(breaks),
        "weight_versions": max((step["version"] for result in results for step in result.steps), default=0),
        "shuffled_rewards": shuffled,
        "held_out_temperature": MEASURED_AT,
        "recipe": asdict(recipe),
        "runs": [asdict(result) for result in results],
        "versions": {name: version(name) for name in ("rolltap", "mini-swe-agent", "litellm", "torch", "renderers")},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


BLOCKS = "▁▂▃▄▅▆▇█"


def progress_bars(console: Console) -> Progress:
    """Progress bars, each followed by a text."""
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
    """Values between 0 and 1 as a line of at most `width` block characters; neighbours are averaged."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[at : at + size]) / len(values[at : at + size]) for at in range(0, len(values), size)]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(mean * len(BLOCKS)))] for mean in means)


def plot(
    curves: Mapping[str, Sequence[float]],
    results: Sequence[Mapping[str, Any]],
    path: Path,
    title: str = "Success on training tasks by step; dots: held-out tasks, before and after",
) -> None:
    """Plots the mean reward of each run, by its label, along the training steps; and its held-out success before and
    after, from `results`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for (label, curve), result in zip(curves.items(), results, strict=True):
        (line,) = axes.plot(range(1, len(curve) + 1), curve, label=label, linewidth=1.5)
        ends = [result["success_before"], result["success_after"]]
        axes.plot([0, len(curve) + 1], ends, "o", color=line.get_color(), markersize=7)
    axes.set(xlabel="training step", ylabel="success", ylim=(-0.02, 1.02))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def share(success: float, n: int) -> str:
    """A success rate with its 95% interval: `0.92 (0.83 to 0.97)`."""
    low, high = wilson(success, n)
    return f"{success:.2f} ({low:.2f} to {high:.2f})"


def closing_table(report: dict[str, Any]) -> Table:
    """The numbers of the demo's report as a table."""
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
