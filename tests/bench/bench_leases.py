"""Lease throughput: `python -m tests.bench.bench_leases`. Writes reports/bench_leases.json.

A call log of `--groups` groups of 8 rollouts of 4,096 tokens (two calls each), one `rolltap serve` on SQLite in a
process of its own, and one trainer that leases, unpacks and acknowledges all of it over HTTP, then all of it again
after a rewind. Counted are the bytes of the per-token arrays as they arrive: ids, mask, log-probs and versions, 13 a
token. Ids and log-probs are random, the worst case for compression.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rolltap import __version__
from rolltap.calllog.facts import CallCompletion, CallIntent, RequestParts
from rolltap.calllog.sql import open_call_log
from rolltap.contract.admin import FinishRollout, NewReward
from rolltap.contract.trainer import Lease, LeaseOptions
from rolltap.engine.tiny import FOLDER
from rolltap.ids import new_id
from rolltap.ledger.groups import GroupSpec
from rolltap.ledger.ledger import Ledger
from rolltap.ledger.rebuilding import LocalRebuilder
from rolltap.reconstructor.reconstruct import reconstruct
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.types import Finish, Outcome, RolloutStatus, Session, Task, Trajectory, VersionSpan

from ..conftest import free_port

REPORT = Path("reports") / "bench_leases.json"
ROLLOUTS = 8
PART = 1024
"""A rollout is a prompt, a reply, more prompt and another reply, of so many tokens each."""

VOCABULARY = 150_000
GOAL_MB_PER_S = 50.0
KEY = "trainer-key"
POLICY = "bench"


@dataclass(frozen=True)
class Result:
    groups: int
    tokens: int
    array_mb: float
    seconds: float
    mb_per_s: float
    groups_per_s: float
    server_cpu_s: float
    mb_per_server_cpu_s: float
    server_mb_at_a_quarter: float
    server_mb_at_the_end: float


async def write(url: str, groups: int) -> None:
    """The record of `groups` groups that are ready to be leased."""
    log = open_call_log(url)
    await log.start()
    rng = np.random.default_rng(0)

    async def trajectories(session_ids: Sequence[str], policy: str = "", /) -> list[Trajectory]:
        return [reconstruct(calls) for _, calls in (await log.calls(session_ids)).values()]

    async def close_session(session_id: str) -> None:
        await log.close_session(session_id, time.time())

    database = log.database  # type: ignore[attr-defined]
    ledger = Ledger(database, rebuilder=LocalRebuilder(database, trajectories), close_session=close_session)
    await ledger.policies.register(POLICY)

    async def rollout(rollout_id: str, reward: float) -> None:
        session = new_id()
        await log.open_session(Session(session, POLICY, session, time.time(), time.time() + 1e6))
        begun = await ledger.rollouts.start(rollout_id, session)
        parent: str | None = None
        for turn in range(2):
            call = new_id()
            ids = rng.integers(0, VOCABULARY, 2 * PART).astype(np.int32)
            await log.append_intent(
                CallIntent(
                    id=call, session_id=session, process="bench", created_at=time.time(), policy=POLICY,
                    dialect="openai_chat", new_ids=ids[:PART], request=RequestParts(b"{}", ()),
                    parent_id=parent, shared=2 * PART * turn,
                )
            )  # fmt: skip
            await log.append_completion(
                CallCompletion(
                    call_id=call, finished_at=time.time(), outcome=Outcome.COMPLETED, finish=Finish.STOP,
                    output_ids=ids[PART:], logprobs=-rng.exponential(0.3, PART).astype(np.float32),
                    versions=(VersionSpan(0, 0, PART),),
                )
            )  # fmt: skip
            parent = call
        await ledger.rewards.append(NewReward(rollout_id, reward))
        await ledger.rollouts.finish(rollout_id, FinishRollout(RolloutStatus.SUCCEEDED, begun.rollout.attempt))

    for _ in track(range(groups), "writing the record"):
        group = await ledger.groups.open(GroupSpec(POLICY, ROLLOUTS, Task(new_id(), "a task")))
        await asyncio.gather(*(rollout(one.id, float(one.index % 2)) for one in group.rollouts))
    await log.close()


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    port, config = free_port(), folder / "rolltap.toml"
    config.write_text(
        f'data = "{folder}"\n[listen]\nagent_port = 0\ntrainer_port = {port}\nadmin_port = 0\n'
        f'[keys]\nadmin = "admin-key"\ntrainer = "{KEY}"\n[engines.none]\nurl = "http://127.0.0.1:9"\n'
        f'[policies.{POLICY}]\nengine = "none"\ntokenizer = "{FOLDER}"\nfamily = "qwen3"\n'
    )
    command = [sys.executable, "-m", "rolltap", "serve", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "log").open("wb"))
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return process, f"http://127.0.0.1:{port}"
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(0.1)
    raise SystemExit(f"the server did not start: {(folder / 'log').read_text()}")


def resident_mb(process: subprocess.Popen[bytes]) -> float:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    raise SystemExit("no VmRSS in /proc")


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def array_bytes(lease: Lease) -> tuple[int, int]:
    """Bytes of the arrays, and tokens."""
    segments = [part for group in lease.groups for record in group.rollouts for part in record.trajectory.segments]
    arrays = [array for part in segments for array in (part.token_ids, part.loss_mask, part.logprobs, part.versions)]
    return sum(array.nbytes for array in arrays), sum(len(part) for part in segments)


def lease_everything(process: subprocess.Popen[bytes], url: str, groups: int, at_once: int) -> Result:
    """All groups twice: to train, and again after a rewind."""
    client = TrainerClient(url, KEY, "bench")
    total = done = tokens = 0
    memory: list[float] = []
    started, worked = time.perf_counter(), cpu_seconds(process)
    for _ in range(2):
        taken = 0
        while taken < groups:
            lease = client.lease(POLICY, groups=at_once, options=LeaseOptions(wait=10))
            if lease is None:
                raise SystemExit(f"only {taken} of {groups} groups were there")
            client.ack(lease, 1)
            size, count = array_bytes(lease)
            total, tokens, taken, done = total + size, tokens + count, taken + len(lease.groups), done + 1
            memory.append(resident_mb(process))
        client.rewind(0, {POLICY: 0})
    seconds, worked = time.perf_counter() - started, cpu_seconds(process) - worked
    return Result(
        groups=2 * groups,
        tokens=tokens,
        array_mb=total / 1e6,
        seconds=seconds,
        mb_per_s=total / 1e6 / seconds,
        groups_per_s=2 * groups / seconds,
        server_cpu_s=worked,
        mb_per_server_cpu_s=total / 1e6 / worked,
        server_mb_at_a_quarter=memory[len(memory) // 4],
        server_mb_at_the_end=memory[-1],
    )


def measure(groups: int, at_once: int) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(write(f"sqlite:///{folder / 'rolltap.db'}", groups))
        process, url = start_server(folder)
        try:
            return lease_everything(process, url, groups, at_once)
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8, help="groups a lease")
    options = parser.parse_args()
    result = measure(options.groups, options.at_once)
    table = Table(title=f"leases of {options.at_once} groups, {ROLLOUTS} rollouts of {4 * PART} tokens each")
    for name, value in asdict(result).items():
        table.add_row(name, f"{value:,.1f}")
    table.add_row("goal, MB/s", f"{GOAL_MB_PER_S:.0f}")
    Console().print(table)
    REPORT.parent.mkdir(exist_ok=True)
    about = {"version": __version__, "python": platform.python_version(), "cores": os.cpu_count(), "time": time.time()}
    REPORT.write_text(json.dumps({**asdict(result), "goal_mb_per_s": GOAL_MB_PER_S, **about}, indent=2))


if __name__ == "__main__":
    main()
