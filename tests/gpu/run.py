"""Everything that only a card can tell, in one command and under 8 minutes: `make gpu`, or `python -m tests.gpu.run`.

    update      the trainer's step at 4B, 1.7B and 0.6B, with all weights and with adapters, beside TRL's
    agreement   log-probs of engine and trainer, in float32 and bfloat16, and what corrections do
    serving     the embedded engine: tokens/s, pushes of 1.7B, versions of a call that a push meets
    demo        `rolltap demo`, shortened

Each step is a process of its own with a limit of time, and writes `NAME.json` after every row: what hangs, crashes or
fills the memory costs only what it would have measured. Needs no network. Without a card it does the same with tiny
models, which shows that it works; those figures are of no worth.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rolltap.cli.common import interrupted_by_term

GOALS = {"tokens_per_s_over_trl": 1.3, "mfu_4b": 0.4}
SHARES = {"update": 0.5, "agreement": 0.12, "serving": 0.2, "demo": 0.18}
"""Of the run's time; a step that ends early leaves its rest to the others."""

PATIENCE = 1.2
"""How often its limit a step may take: a row begins within the limit and ends later."""

Measure = Callable[[float, Path], Iterator[Mapping[str, Any]]]
"""A step's rows, within about so many seconds; the folder is for its files."""


def update(seconds: float, folder: Path) -> Iterator[Mapping[str, Any]]:
    from . import update

    for result in update.compare(_sizes(), _device(), seconds):
        yield asdict(result)


def agreement(seconds: float, folder: Path) -> Iterator[Mapping[str, Any]]:
    from . import agreement

    for result in agreement.compare(_sizes(), _device()):
        yield asdict(result)


def serving(seconds: float, folder: Path) -> Iterator[Mapping[str, Any]]:
    from . import serving

    for result in serving.measure(_sizes(), _device()):
        yield {"what": type(result).__name__.lower(), **asdict(result)}


def demo(seconds: float, folder: Path) -> Iterator[Mapping[str, Any]]:
    """The whole product: engine and trainer choose the card by themselves."""
    from rolltap.cli.demo import run

    run(seeds=[0], out=folder / "demo", recipe=_sizes().demo, shuffle_rewards=False)
    report = json.loads((folder / "demo" / "report.json").read_text(encoding="utf-8"))
    (played,) = report["runs"]
    mismatches = [step["mismatch_mean"] for step in played["steps"] if step["mismatch_mean"] is not None]
    parts = ("wait", "forward", "backward", "optimiser", "push")
    names = ("success_before", "success_after", "seconds", "calls", "sampled_tokens", "kept_tokens", "weight_versions")
    yield {
        **{name: report[name] for name in names},
        "trainer_seconds": {part: sum(step["seconds"][part] for step in played["steps"]) for part in parts},
        "mismatch_mean": sum(mismatches) / len(mismatches) if mismatches else None,
    }


STEPS: dict[str, Measure] = {"update": update, "agreement": agreement, "serving": serving, "demo": demo}


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _sizes() -> Any:
    from .shapes import ON_A_CARD, WITHOUT_A_CARD

    return ON_A_CARD if _device().type == "cuda" else WITHOUT_A_CARD


def about() -> dict[str, Any]:
    """Where this was measured."""
    import torch
    import transformers

    from rolltap import __version__

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU, tiny models: no figure of worth",
        "memory_gb": torch.cuda.get_device_properties(0).total_memory / 1e9 if cuda else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "version": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


@interrupted_by_term()
def run_step(measure: Measure, seconds: float, path: Path) -> None:
    """Writes the step's rows to `path`, after each of them."""
    report: dict[str, Any] = {"about": about(), "goals": GOALS, "rows": [], "complete": False}
    started = time.monotonic()
    for row in measure(seconds, path.parent):
        report["rows"].append(row)
        report["seconds"] = time.monotonic() - started
        _write(path, report)
    report |= {"complete": True, "seconds": time.monotonic() - started}
    _write(path, report)


def run_all(commands: Mapping[str, Sequence[str]], seconds: float, out: Path) -> dict[str, str]:
    """Runs each step's command, to which its seconds are appended; returns what failed, which its file says, too."""
    deadline, failures = time.monotonic() + seconds, {}
    for name, command in commands.items():
        shares = sum(SHARES.get(other, 1.0) for other in list(commands)[list(commands).index(name) :])
        limit = max(1.0, (deadline - time.monotonic()) * SHARES.get(name, 1.0) / shares)
        log = out / f"{name}.log"
        with log.open("wb") as written:
            child = subprocess.Popen([*command, f"{limit:.1f}"], stdout=written, stderr=subprocess.STDOUT)
            try:
                status = child.wait(limit * PATIENCE)
                failure = f"ended with status {status}" if status else ""
            except subprocess.TimeoutExpired:
                failure = f"took over {limit * PATIENCE:.0f} s"
                _end(child)
        if failure:
            path = out / f"{name}.json"
            report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
            tail = log.read_text(errors="replace").splitlines()[-20:]
            _write(path, {**report, "complete": False, "failure": failure, "log": tail})
            failures[name] = failure
        print(f"{name}: {failure or 'done'}", *told(out / f"{name}.json"), sep="\n  ", flush=True)
    return failures


def told(path: Path) -> list[str]:
    """The rows of a step's file, a line each; figures within figures are only there."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return [
        ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
            if value not in (None, "", False) and not isinstance(value, (dict, list))
        )
        for row in rows
    ]


def _end(child: subprocess.Popen[bytes]) -> None:
    """In order, so that it ends what it started; then by force."""
    child.terminate()
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _write(path: Path, report: Mapping[str, Any]) -> None:
    making = path.with_suffix(".making")
    making.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    making.rename(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("reports") / "gpu")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--within", help="runs one step in this process: its name", choices=STEPS)
    parser.add_argument("seconds", nargs="?", type=float, help="of --within")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.within:
        run_step(STEPS[given.within], given.seconds, given.out / f"{given.within}.json")
        return 0
    here = about()
    print(f"{here['device']}; torch {here['torch']}; at most {given.minutes:g} minutes; all in {given.out}", flush=True)
    command = [sys.executable, "-m", "tests.gpu.run", "--out", str(given.out), "--within"]
    failures = run_all({name: [*command, name] for name in given.steps}, 60 * given.minutes, given.out)
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
