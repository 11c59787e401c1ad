"""What merging calls into segments saves: `python -m tests.bench.bench_merging`. Writes reports/merging.json.

    python -m tests.bench.bench_merging --model FOLDER --store run/data/rolltap.db --rollouts 8

Polar (arXiv 2605.24220) trains on a row a request or on merged rows. Here both, and merged rows whose shared prefixes
are computed once, on one recorded step of 8 groups of 8 rollouts of the demo's model, for a harness that only appends
(mini-swe-agent) and one that shortens its history; or on the first rollouts of any record, with its model. Counted are
CPU seconds of one thread: of the trainer's step (forward, backward, optimiser), and of the embedded engine when it
samples the same calls again. `busy` follows from them: the share of time that an engine samples whose trainer has as
much hardware, both at work at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.datasets.record import ReadOptions, open_record, recorded_groups
from rolltap.engine.model import CausalModel
from rolltap.engine.sampling import SamplingOptions, SamplingRequest, TokenDelta
from rolltap.engine.scheduler import EngineLoop
from rolltap.engine.tiny import FOLDER
from rolltap.engine.tiny.tasks import MINI_SWE_AGENT, SUBMIT
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgentInProcess
from rolltap.harnesses.base import Harness
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.thread import ThreadRuntime
from rolltap.reconstructor.exporters.dataset import Grouping
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.reconstructor.rules import session_rules
from rolltap.trainer_client.data.collate import collate
from rolltap.trainer_client.data.packing import PackedRow, Packer
from rolltap.trainer_client.model.learner import Learner
from rolltap.trainer_client.model.loss import PolicyLoss
from rolltap.trainer_client.model.ranks import Ranks
from rolltap.trainer_client.settings import load_trainer_settings
from rolltap.types import Call, RolloutStatus

from .bench_offline import RecordingStack, play

REPORT = Path("reports") / "merging.json"
LOOP = Path(__file__).with_name("forgetful_loop.py")
HARNESSES = ("mini-swe-agent", "a loop that forgets")
BUDGET = 4096
GROUPS, ROLLOUTS = 8, 8
POLAR = {"one row a call": (1185, 0.204), "merged": (218, 0.877)}
"""The paper's: trainer updates, and the share of time that the GPUs of rollouts work; 5.39 times less time in all."""
WAYS: Mapping[str, tuple[str, bool]] = {
    "one row a call": ("per_call", False),
    "merged": ("tree", False),
    "merged, shared prefixes": ("tree", True),
}
"""The strategy of the reconstructor, and whether the trainer computes shared prefixes once."""


@dataclass(frozen=True)
class Result:
    harness: str
    rows_are: str
    rows: int
    tokens: int
    trained: int
    trainer_cpu_s: float
    engine_cpu_s: float

    @property
    def busy(self) -> float:
        return min(1.0, self.engine_cpu_s / self.trainer_cpu_s)


def record(name: str, folder: Path) -> list[list[Call]]:
    """The calls of each rollout of one step, by the harness `name`."""
    folder.mkdir()
    harness: Harness = MiniSweAgentInProcess(MINI_SWE_AGENT)
    runtime: Any = ThreadRuntime()
    if name != "mini-swe-agent":
        harness = AnyCommand((sys.executable, str(LOOP), "{prompt}", SUBMIT))
        runtime = ProcessRuntime(folder / "workspaces")
    with RecordingStack(folder, FOLDER) as stack:
        groups = asyncio.run(play(stack, harness, runtime, GROUPS, ROLLOUTS))
        rollouts = asyncio.run(_read(f"sqlite:///{stack.database.absolute()}"))
    if failed := [
        one.reason for group in groups for one in group.rollouts if one.status is not RolloutStatus.SUCCEEDED
    ]:
        raise SystemExit(f"{name}: {len(failed)} rollouts did not succeed: {failed[0]}")
    return rollouts


async def _read(store: str) -> list[list[Call]]:
    options = ReadOptions("tree", lambda session: session_rules(session, ()), lambda session: (), Grouping())
    log = open_record(store)
    await log.start()
    try:
        groups = recorded_groups(log, options, lambda session, error: print(session, error))
        return [sorted(item.calls.values(), key=lambda call: call.id) async for group in groups for item in group]
    finally:
        await log.close()


def step_seconds(
    model: Path, rollouts: Sequence[Sequence[Call]], strategy: str, share: bool, times: int
) -> tuple[Any, float]:
    """The packs of a step, and the CPU seconds of the fastest of some steps."""
    segments = [
        (number, segment)
        for number, calls in enumerate(rollouts)
        for segment in reconstruct(calls, strategy=strategy).segments
        if segment.loss_mask.any()
    ]
    total = sum(int(segment.loss_mask.sum()) for _, segment in segments)
    rows = [
        PackedRow.uniform(one, number, at, (-1.0) ** number, 1 / total) for at, (number, one) in enumerate(segments)
    ]
    packs = Packer(BUDGET, share=share)(rows)
    settings = load_trainer_settings(
        key="none", policy="bench", model=model, out=model, compute={"device": "cpu", "threads": 1}
    )
    learner, loss = Learner(model, settings, Ranks.of_environment("cpu")), PolicyLoss()
    batches = [collate(pack) for pack in packs]
    seconds = []
    for number in range(times):
        started = time.process_time()
        for batch in batches:
            learner.backward(loss(learner.predict(batch), batch).loss)
        learner.clip()
        learner.apply(number + 1)
        seconds.append(time.process_time() - started)
    return packs, min(seconds)


def sampling_seconds(model: Path, rollouts: Sequence[Sequence[Call]]) -> float:
    """CPU seconds in which the engine samples as many tokens behind the same prompts, each rollout in its turns."""
    loop = EngineLoop(CausalModel.load(model), frozenset(), _deliver, slots=len(rollouts))
    loop.start()
    started = time.process_time()
    for turn in range(max(map(len, rollouts))):
        calls = [calls[turn] for calls in rollouts if turn < len(calls)]
        replies: list[SimpleQueue[TokenDelta]] = [SimpleQueue() for _ in calls]
        loop.submit(
            [
                SamplingRequest(
                    call.id,
                    call.prompt_ids.tolist(),
                    SamplingOptions(len(call.output_ids), ignore_eos=True),
                    reply.put,
                    False,
                )
                for call, reply in zip(calls, replies, strict=True)
            ]
        ).result()
        for reply in replies:
            reply.get()
    seconds = time.process_time() - started
    loop.close()
    return seconds


def _deliver(outbox: Sequence[tuple[Any, TokenDelta]]) -> None:
    for sink, delta in outbox:
        sink(delta)


def recorded(harnesses: Sequence[str]) -> Iterator[tuple[str, list[list[Call]]]]:
    for harness in harnesses:
        with tempfile.TemporaryDirectory() as name:
            yield harness, record(harness, Path(name) / "stack")


def measure(model: Path, records: Iterable[tuple[str, list[list[Call]]]], times: int) -> list[Result]:
    torch.set_num_threads(1)
    results = []
    for harness, rollouts in records:
        sampling = sampling_seconds(model, rollouts)
        for way, (strategy, share) in WAYS.items():
            packs, seconds = step_seconds(model, rollouts, strategy, share, times)
            rows = [row for pack in packs for row in pack.rows]
            trained = sum(int(row.segment.loss_mask.sum()) for row in rows)
            results.append(Result(harness, way, len(rows), sum(map(len, packs)), trained, seconds, sampling))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="steps of which the fastest counts")
    parser.add_argument("--harnesses", nargs="+", choices=HARNESSES, default=HARNESSES)
    parser.add_argument("--model", type=Path, default=FOLDER, help="that of --store")
    parser.add_argument(
        "--store", type=Path, nargs="*", default=(), help="records (SQLite) to take in place of our own"
    )
    parser.add_argument("--rollouts", type=int, default=GROUPS * ROLLOUTS, help="of each --store")
    given = parser.parse_args()
    stores = [(str(path), asyncio.run(_read(f"sqlite:///{path.absolute()}"))[: given.rollouts]) for path in given.store]
    results = measure(given.model, stores or recorded(given.harnesses), given.times)
    table = Table("harness", "rows are", "rows", "tokens", "trainer CPU s", "times less", "engine CPU s", "busy")
    for one in results:
        first = next(other for other in results if other.harness == one.harness)
        times = f"{first.trainer_cpu_s / one.trainer_cpu_s:.2f}"
        cpu = (f"{one.trainer_cpu_s:.2f}", times, f"{one.engine_cpu_s:.2f}", f"{one.busy:.0%}")
        table.add_row(one.harness, one.rows_are, str(one.rows), f"{one.tokens:,}", *cpu)
    for way, (updates, busy) in POLAR.items():
        times = "5.39" if way == "merged" else "1.00"
        table.add_row("Polar's paper", way, f"{updates:,} updates", "", "", times, "", f"{busy:.0%}")
    Console(width=120).print(table)
    REPORT.parent.mkdir(exist_ok=True)
    report: dict[str, Any] = {"results": [{**asdict(one), "busy": one.busy} for one in results], "polar": POLAR}
    report |= {
        "version": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "time": time.time(),
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
