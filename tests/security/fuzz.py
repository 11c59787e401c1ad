"""The long fuzz run: `python -m tests.security.fuzz`. Adds to reports/fuzz.json and prints its table.

One server process, real sockets, all planes and dialects. A batch is a thousand requests and follows from its number
alone; batches that the report holds are not sent again, so a run that was stopped goes on where it was. Each part of a
run has a server of its own, whose memory is looked at after every batch. It fails if a request got a 5xx, no answer,
or one that took over `SLOW_S` twice: the second time alone, as a busy machine is slow to all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from rolltap.engine.scripted import ScriptedEngine, say
from rolltap.engine.tiny import FOLDER
from rolltap.errors import RateLimited
from rolltap.harnesses.client import AdminClient
from rolltap.types import Task

from ..harnesses.house import POLICY, House, opened
from .junk import Hit, World, batch
from .wire import Connection

REPORT = Path(__file__).parents[2] / "reports" / "fuzz.json"
BATCH = 1000
CONNECTIONS = 16
SLOW_S = 2.0
WARM_BATCHES = 20
"""After so many batches of a server its caches are full: memory is compared from there on."""


class Batch(msgspec.Struct, frozen=True):
    """What came of one batch. `part` numbers the servers, `rss_mb` is the server's memory after it."""

    number: int
    part: int
    statuses: dict[str, dict[str, int]]  # by plane or dialect
    seconds: float
    slowest: float
    slow: int
    rss_mb: float
    failures: list[str] = []


class Report(msgspec.Struct):
    batches: list[Batch] = []

    @classmethod
    def read(cls, path: Path) -> Report:
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        value = msgspec.to_builtins(self) | self.totals()
        whole = path.with_suffix(".part")
        whole.write_bytes(msgspec.json.encode(value))
        whole.replace(path)

    def totals(self) -> dict[str, Any]:
        kinds: dict[str, Counter[str]] = {}
        for each in self.batches:
            for kind, statuses in each.statuses.items():
                kinds.setdefault(kind, Counter()).update(statuses)
        return {
            "requests": sum(sum(counts.values()) for counts in kinds.values()),
            "kinds": {kind: dict(sorted(counts.items())) for kind, counts in sorted(kinds.items())},
            "failures": [failure for each in self.batches for failure in each.failures],
            "slowest": max((each.slowest for each in self.batches), default=0.0),
            "slow": sum(each.slow for each in self.batches),
            "seconds": sum(each.seconds for each in self.batches),
            "memory": self.memory(),
            "python": platform.python_version(),
            "time": time.strftime("%Y-%m-%d"),
        }

    def memory(self) -> list[dict[str, float]]:
        """Of each server that served long enough: batches, and MB after it was warm and at its end."""
        parts: dict[int, list[Batch]] = {}
        for each in self.batches:
            parts.setdefault(each.part, []).append(each)
        return [
            {"batches": len(run), "warm_mb": run[WARM_BATCHES - 1].rss_mb, "end_mb": run[-1].rss_mb}
            for run in parts.values()
            if len(run) > WARM_BATCHES
        ]


class Served(msgspec.Struct):
    """What a server in another process tells of itself."""

    pid: int
    ports: dict[str, int]
    keys: dict[str, str]
    schemas: dict[str, Any]


@asynccontextmanager
async def server() -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        command = (sys.executable, "-m", "tests.security.fuzz", "--serve", folder)
        log = Path(REPORT.parent, "fuzz-server.log")
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as errors:  # noqa: ASYNC230  once
            process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=errors, limit=16 << 20)
            assert process.stdout is not None
            assert process.stdin is not None
            try:
                yield msgspec.json.decode(await process.stdout.readline(), type=Served)
            finally:
                process.stdin.close()
                await process.wait()


async def serve(folder: Path) -> None:
    """A server until its standard input ends."""
    async with (
        ScriptedEngine(say("Hello."), FOLDER, keep=0) as engine,  # a journal of prompts would grow with the run
        opened(engine, folder, aliases=("gardener",), max_context=8192) as home,
    ):
        print(msgspec.json.encode(served(home)).decode(), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def served(home: House) -> Served:
    keys = home.app.settings.keys
    ports = {plane: int(url.rpartition(":")[2]) for plane, url in home.urls.items()}
    schemas = {plane: home.app.planes[plane].app.openapi() for plane in ("trainer", "admin")}
    return Served(os.getpid(), ports, {"trainer": keys.trainer, "admin": keys.admin}, schemas)


async def world(served: Served, number: int) -> World:
    """A session, a group and keys of a batch's own."""
    async with AdminClient(f"http://127.0.0.1:{served.ports['admin']}", served.keys["admin"]) as client:
        session = await client.open_session(policy=POLICY)
        ids = {"name": [POLICY], "policy": [POLICY], "session_id": [session.session_id]}
        with suppress(RateLimited):  # requests of batches before have opened as many groups as there may be
            group = await client.open_group(Task(f"task-{number}", "Do it."), policy=POLICY, n=2)
            await client.cancel_group(group.id)
            ids |= {"group_id": [group.id], "rollout_id": list(group.rollout_ids)}
    return World({"agent": session.endpoint.key, **served.keys}, ids)


def closing(served: Served, session_id: str) -> bytes:
    head = f"POST /sessions/{session_id}/close HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return f"{head}Authorization: Bearer {served.keys['admin']}\r\n\r\n".encode()


class Sender:
    """Sends a batch over a few connections to each plane at once."""

    def __init__(self, served: Served) -> None:
        self._pid = served.pid
        self._connections = [
            {plane: Connection(port) for plane, port in served.ports.items()} for _ in range(CONNECTIONS)
        ]

    async def send(self, number: int, part: int, hits: deque[Hit]) -> Batch:
        began = time.perf_counter()
        self.statuses: dict[str, Counter[str]] = {}
        self.slowest, self.failures = 0.0, list[str]()
        self.late: list[Hit] = []
        await asyncio.gather(*(self._lane(lane, hits) for lane in self._connections))
        for hit in self.late:
            answer = await self._connections[0][hit.plane].send(hit.data)
            if answer.seconds > SLOW_S:
                self.failures.append(f"{answer.seconds:.1f} s, alone: {hit.plane} {hit.data[:2000]!r}")
        statuses = {kind: dict(counts) for kind, counts in self.statuses.items()}
        seconds = time.perf_counter() - began
        return Batch(
            number, part, statuses, seconds, self.slowest, len(self.late), _rss_mb(self._pid), self.failures[:20]
        )

    async def _lane(self, connections: dict[str, Connection], hits: deque[Hit]) -> None:
        while hits:
            hit = hits.popleft()
            answer = await connections[hit.plane].send(hit.data)
            self.statuses.setdefault(hit.kind, Counter())[str(answer.status)] += 1
            self.slowest = max(self.slowest, answer.seconds)
            if answer.seconds > SLOW_S:
                self.late.append(hit)
            if answer.status >= 500 or answer.status <= 0:
                self.failures.append(f"{answer.status}: {hit.plane} {hit.data[:2000]!r} -> {answer.head[:300]!r}")


def _rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def run(requests: int, seconds: float) -> Report:
    report = Report.read(REPORT)
    done = {each.number for each in report.batches}
    part = max((each.part for each in report.batches), default=-1) + 1
    until = time.monotonic() + seconds
    async with server() as served:
        sender = Sender(served)
        for number in range(requests // BATCH):
            if number in done or time.monotonic() > until:
                continue
            made = await world(served, number)
            hits = deque(batch(number, BATCH - 1, served.schemas, made))
            session_id = made.ids["session_id"][0]
            hits.append(Hit("admin", "admin", closing(served, session_id)))
            report.batches.append(await sender.send(number, part, hits))
            report.write(REPORT)
            last = report.batches[-1]
            print(
                f"{number} {last.seconds:.1f} s {last.slowest:.2f} s {last.rss_mb:.0f} MB", *last.failures, flush=True
            )
    return report


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--serve", type=Path)
    options.add_argument("--requests", type=int, default=1_000_000)
    options.add_argument("--seconds", type=float, default=float("inf"), help="begin no batch after so long")
    chosen = options.parse_args()
    if chosen.serve:
        uvloop.run(serve(chosen.serve))
        return
    report = uvloop.run(run(chosen.requests, chosen.seconds))
    print(table(report.totals()))
    sys.exit(bool(report.totals()["failures"]))


def table(totals: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = ["| plane or dialect | requests | 2xx | 4xx | 5xx | no answer |", "|---|---|---|---|---|---|"]
    for kind, counts in totals["kinds"].items():
        by_class = Counter[str]()
        for status, count in counts.items():
            by_class["none" if int(status) <= 0 else status[0]] += count
        figures = (by_class[each] for each in ("2", "4", "5", "none"))
        lines.append(f"| {kind} | {sum(counts.values()):,} | " + " | ".join(f"{each:,}" for each in figures) + " |")
    memory = "; ".join(f"{run['warm_mb']:.0f} MB, {run['end_mb']:.0f} MB" for run in totals["memory"])
    return "\n".join(lines) + (
        f"\n\n{totals['requests']:,} requests in {totals['seconds'] / 60:.0f} minutes; the slowest answer came after "
        f"{totals['slowest']:.1f} s; {totals['slow']} took over {SLOW_S:g} s and were sent again alone. Failures: "
        f"{len(totals['failures'])}. Each server's memory after {WARM_BATCHES},000 requests and at its end: {memory}. "
        f"(Python {totals['python']}, {totals['time']}.)"
    )


if __name__ == "__main__":
    main()
