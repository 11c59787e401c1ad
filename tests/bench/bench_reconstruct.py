"""The reconstructor's speed: `python -m tests.bench.bench_reconstruct`. Writes reports/bench_reconstruct.json.

Sessions of the shape that harnesses make, by one core: with the log's own hints, without any, with many branches, from
SQLite's rows, and a whole log streamed into a dataset. Times are of the CPU, so that a busy machine tells the same.
Token rates count the tokens of the rows that come out, not the
prompts that go in (which repeat their history): `read` beside them counts those.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rolltap import __version__
from rolltap.calllog.database import Database
from rolltap.calllog.facts import CallCompletion, CallIntent, RequestParts
from rolltap.calllog.sql import SqlCallLog
from rolltap.cli.export import ExportJob, run_export
from rolltap.protocols.conversation import Message, Text
from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.dataset import Query
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import Rules
from rolltap.types import Call, Finish, Outcome, Session, Trajectory, VersionSpan

REPORT = Path("reports") / "bench_reconstruct.json"
GOAL_TOKENS = 10e6
GOAL_BRANCHES_S = 1.0
VOCABULARY = 150_000


@dataclass(frozen=True)
class Figure:
    """One line of the table. `tokens` are those of the rows that came out."""

    name: str
    calls: int
    tokens: int
    read: int
    seconds: float
    goal: str = ""
    met: bool | None = None

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def session(
    rng: np.random.Generator, turns: int, new: int, output: int, *, prefix: str = "", hint: bool = True
) -> list[Call]:
    """A conversation of `turns` calls, each with `new` prompt tokens and `output` sampled ones behind the last."""
    calls: list[Call] = []
    context = np.empty(0, np.int32)
    for turn in range(turns):
        prompt = np.concatenate([context, _ids(rng, new)])
        calls.append(
            _call(f"{prefix}{turn:06d}", prompt, _ids(rng, output), calls[-1] if calls and hint else None, context)
        )
        context = np.concatenate([prompt, calls[-1].output_ids])
    return calls


def branching(rng: np.random.Generator, calls: int, branches: int, *, hint: bool) -> list[Call]:
    """A trunk of 8,000 tokens and `branches` conversations that go on from it in turn, `calls` in all."""
    made = [_call("000000", _ids(rng, 8000), _ids(rng, 200), None, np.empty(0, np.int32))]
    tips = [made[0]] * branches
    for number in range(1, calls):
        branch = number % branches
        tip = tips[branch]
        context = np.concatenate([tip.prompt_ids, tip.output_ids])
        call = _call(
            f"{number:06d}", np.concatenate([context, _ids(rng, 100)]), _ids(rng, 100), tip if hint else None, context
        )
        tips[branch] = call
        made.append(call)
    return made


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, count, dtype=np.int32)


def _call(name: str, prompt: np.ndarray, output: np.ndarray, parent: Call | None, context: np.ndarray) -> Call:
    return Call(
        id=name,
        session_id="s",
        prompt_ids=prompt,
        output_ids=output,
        logprobs=np.full(len(output), -0.5, np.float32),
        versions=(VersionSpan(1, 0, len(output)),),
        parent_id=parent.id if parent else None,
        shared=len(context) if parent else 0,
        policy="p",
        delivered=True,
    )


def measured(name: str, calls: list[Call], goal: str = "", met: Callable[[float, float], bool] | None = None) -> Figure:
    """The median of five reconstructions."""
    seconds = []
    trajectory = reconstruct(calls)
    for _ in range(5):
        start = time.process_time()
        trajectory = reconstruct(calls)
        seconds.append(time.process_time() - start)
    return _figure(name, trajectory, statistics.median(seconds), goal, met)


def _figure(
    name: str, trajectory: Trajectory, seconds: float, goal: str, met: Callable[[float, float], bool] | None
) -> Figure:
    counts = trajectory.counts
    tokens = counts["row_tokens"]
    read = counts["prompt_tokens"] + counts["sampled_tokens"]
    return Figure(name, counts["calls"], tokens, read, seconds, goal, met(tokens / seconds, seconds) if met else None)


def fast(rate: float, seconds: float) -> bool:
    return rate >= GOAL_TOKENS


async def from_store(rng: np.random.Generator, folder: Path) -> Figure:
    """A session of 20 turns and 32k tokens, from SQLite's rows to arrays; one statement, decoding and all."""
    log = SqlCallLog(Database(f"sqlite:///{folder}/one.db"))
    await log.start()
    await record(log, session(rng, 20, 1400, 200, prefix="x"), "s")
    seconds = []
    trajectory = reconstruct([])
    for _ in range(9):
        start = time.process_time()
        rows = await log.rows("s")
        trajectory = reconstruct([row.call() for row in rows])
        seconds.append(time.process_time() - start)
    await log.close()
    return _figure("20 turns to 32k tokens, from SQLite", trajectory, statistics.median(seconds), "10 M tokens/s", fast)


async def record(log: SqlCallLog, calls: list[Call], session_id: str) -> None:
    """Writes a session as the proxy does: deltas of tokens, and a message each way."""
    await log.open_session(Session(session_id, "p", f"hash-{session_id}", 1e9, 2e9))
    head, item = b'{"model":"p"}', b'{"role":"user","content":"and now?"}'
    reply = msgspec.json.encode(Message("assistant", (Text("as you wish"),)))
    for number, call in enumerate(calls):
        await log.append_intent(
            CallIntent(
                call.id, session_id, "bench", 1e9 + number, "p", "openai_chat", call.prompt_ids[call.shared :],
                RequestParts(head, (item,), 0), parent_id=call.parent_id, shared=call.shared,
            )
        )  # fmt: skip
        await log.append_completion(
            CallCompletion(
                call.id, 1e9 + number, Outcome.COMPLETED, Finish.STOP, call.output_ids, call.logprobs, call.versions,
                message=reply,
            )
        )  # fmt: skip


async def whole_log(rng: np.random.Generator, folder: Path, calls: int, console: Console) -> dict[str, Any]:
    """A log of many sessions of 20 calls, streamed into Parquet; the peak of memory half way and at the end."""
    url = f"sqlite:///{folder}/log.db"
    log = SqlCallLog(Database(url))
    await log.start()
    each = 20
    sessions = calls // each
    for start in track(range(0, sessions, 64), "recording", console=console):
        made = {
            f"s{n:06d}": session(rng, each, 60, 40, prefix=f"s{n:06d}-")
            for n in range(start, min(start + 64, sessions))
        }
        await asyncio.gather(*(record(log, found, name) for name, found in made.items()))
    await log.close()
    marks: list[tuple[int, int]] = []

    def show(seen: int, _: int) -> None:
        if seen in (sessions // 2, sessions):
            marks.append((seen, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024))

    job = ExportJob(url, folder / "dataset", exporter_named("trajectories"), Query(), lambda _: Rules())
    start = time.process_time()
    manifest = await run_export(job, show=show)
    return {
        "calls": sessions * each,
        "rows": manifest["rows"],
        "tokens": manifest["reconstruction"]["row_tokens"],
        "seconds": time.process_time() - start,
        "peak_mb_half_way": marks[0][1],
        "peak_mb_at_the_end": marks[-1][1],
    }


def shown(figures: list[Figure], streamed: dict[str, Any]) -> Table:
    table = Table("case", "calls", "tokens in rows", "read", "CPU ms", "M tokens/s", "goal", "met")
    for figure in figures:
        met = "" if figure.met is None else "yes" if figure.met else "NO"
        table.add_row(
            figure.name, f"{figure.calls:,}", f"{figure.tokens:,}", f"{figure.read:,}", f"{figure.seconds * 1e3:.1f}",
            f"{figure.rate / 1e6:.1f}", figure.goal, met,
        )  # fmt: skip
    memory = f"peak {streamed['peak_mb_half_way']} MB half way, {streamed['peak_mb_at_the_end']} MB at the end"
    table.add_row(
        f"a log into Parquet; {memory}", f"{streamed['calls']:,}", f"{streamed['tokens']:,}", "",
        f"{streamed['seconds'] * 1e3:,.0f}", f"{streamed['tokens'] / streamed['seconds'] / 1e6:.2f}", "flat memory",
        "yes" if streamed["peak_mb_at_the_end"] < 1.1 * streamed["peak_mb_half_way"] else "NO",
    )  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000, help="calls of the streamed log")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    console = Console()
    quick = lambda rate, seconds: seconds < GOAL_BRANCHES_S  # noqa: E731
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = [
            measured("20 turns to 32k tokens, hints", session(rng, 20, 1400, 200), "10 M tokens/s", fast),
            measured("20 turns to 32k tokens, no hints", session(rng, 20, 1400, 200, hint=False)),
            measured("40 turns to 64k tokens, hints", session(rng, 40, 1400, 200)),
            asyncio.run(from_store(rng, folder)),
            measured("2,000 calls, 500 branches, hints", branching(rng, 2000, 500, hint=True), "< 1 s", quick),
            measured("2,000 calls, 500 branches, no hints", branching(rng, 2000, 500, hint=False), "< 1 s", quick),
        ]
        streamed = asyncio.run(whole_log(rng, folder, args.calls, console))
    console.print(shown(figures, streamed))
    report = {
        "rolltap": __version__,
        "seed": args.seed,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "figures": [{**asdict(figure), "tokens_per_s": figure.rate} for figure in figures],
        "log": streamed,
    }
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
