"""`rolltap demo`: the main job, end to end, and its report."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import shutil
import signal
import time
from collections import Counter
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from rolltap.cli.doctor import missing_modules
from rolltap.cli.export import Job, run_export
from rolltap.demo.learn import MEASURED_AT, PENALISED, POLICIES, POLICY, Learner, Recipe, Run, Shuffled
from rolltap.demo.show import closing_table, plot, progress_bars, sparkline
from rolltap.demo.stack import DemoFailed, Stack
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.dataset import Query
from rolltap.reconstructor.exporters.select import parse_where
from rolltap.reconstructor.rules import Rules


def run(*, seeds: list[int], out: Path, recipe: Recipe, shuffle_rewards: bool) -> int:
    """The exit status: 0 if every seed ran to its end."""
    console = Console()
    missing = [name for extra in ("tokens", "train", "demo", "export") for name in missing_modules(extra)]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}: pip install 'rolltap[demo]'")
    if not (FOLDER / "model.safetensors").exists():
        raise ConfigError(f"the tiny model is missing; make it with `python -m rolltap.engine.tiny.make {FOLDER}`")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the demo's processes end with it
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for name in ("rolltap", "litellm_model"):
        logging.getLogger(name).setLevel(logging.ERROR)
    runs: list[Run] = []
    records: list[dict[str, Any]] = []
    for seed in seeds:
        folder = out / f"seed-{seed}" if len(seeds) > 1 else out
        folder.mkdir(exist_ok=True)
        runs.append(_one_seed(console, folder, recipe, seed, shuffle_rewards))
        records.append(_record(console, folder))
    report = _report(recipe, runs, records, shuffle_rewards)
    plot({one.seed: one.curve for one in runs}, report["runs"], out / "reward.png")
    reports = Path("reports")
    reports.mkdir(exist_ok=True)
    name = "demo-control" if shuffle_rewards else "demo"
    (reports / f"{name}.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    for one in runs:
        console.print(f"seed {one.seed}  reward by step  [green]{sparkline(one.curve)}[/]")
    console.print(closing_table(report))
    console.print(f"database  {out}/data/rolltap.db\ndataset   {out}/dataset\nplot      {out}/reward.png")
    console.print(f"report    {reports}/{name}.json")
    return 0


def _one_seed(console: Console, folder: Path, recipe: Recipe, seed: int, shuffle: bool) -> Run:
    label = " (control: rewards shuffled)" if shuffle else ""
    console.print(f"[bold]seed {seed}[/]{label}: mini-swe-agent, unmodified, on small file-system tasks")
    with progress_bars(console) as bars, Stack(folder.absolute(), FOLDER, POLICIES) as stack:
        tasks = {
            "before": bars.add_task("held-out tasks before", total=recipe.held_out, note=""),
            "train": bars.add_task("training steps", total=recipe.steps, note="", start=False),
            "after": bars.add_task("held-out tasks after", total=recipe.held_out, note="", start=False),
        }

        def note(part: str, done: int, text: str) -> None:
            bars.start_task(tasks[part])
            bars.update(tasks[part], completed=done, note=text)

        learner = Learner(stack, recipe, seed, Shuffled(seed) if shuffle else None, note)
        try:
            return asyncio.run(learner.run())
        except* DemoFailed as failed:
            raise failed.exceptions[0] from None


def _record(console: Console, folder: Path) -> dict[str, Any]:
    """Exports the record of the trained policy, as `rolltap export` would; returns the reconstruction report."""
    job = Job(
        store=f"sqlite:///{(folder / 'data' / 'rolltap.db').absolute()}",
        out=folder / "dataset",
        exporter=exporter_named("trajectories", {}),
        query=Query(where=parse_where([f"policy={POLICY}"])),
        rules=Rules().train(*PENALISED),
        differs=None,
    )
    with console.status("reading the record back"):
        return asyncio.run(run_export(job))["reconstruction"]


def _report(recipe: Recipe, runs: list[Run], records: list[dict[str, Any]], shuffled: bool) -> dict[str, Any]:
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
        "seeds": [one.seed for one in runs],
        "success_before": [one.success_before for one in runs],
        "success_after": [one.success_after for one in runs],
        "seconds": sum(one.seconds for one in runs),
        **counts,
        "breaks": dict(breaks),
        "weight_versions": max((step["version"] for one in runs for step in one.steps), default=0),
        "shuffled_rewards": shuffled,
        "held_out_temperature": MEASURED_AT,
        "recipe": asdict(recipe),
        "runs": [asdict(one) for one in runs],
        "versions": {name: version(name) for name in ("rolltap", "mini-swe-agent", "litellm", "torch", "renderers")},
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
