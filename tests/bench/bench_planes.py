"""What the other planes' work costs an agent: `python -m tests.bench.bench_planes`. Writes reports/bench_planes.json.

One `rolltap serve` on SQLite before an engine with canned replies. Agent calls start at a steady rate, whether or not
earlier ones have ended, and each is timed from the moment it was due. Beside them, in turns, runs nothing or one of:

* `junk`: bodies of 300 MB without a key to every plane, ten a second;
* `flood`: the same as fast as they are refused, each over a connection of its own;
* `lease`: leases of many large groups, which are given back;
* `read`: all tokens of a long call, a session's trajectory, a search, one HTML file of a group, again and again;
* `submit`: an admin's request of `--submit-mb` MB to queue tasks;
* `odd`: bodies of 1 MiB that hold what is slow to read, and are refused.

Each round is a stretch of nothing and one of each of them; figures are medians over the rounds, and the differences
are taken within a round. Memory is that of the server and its children, the most seen while the work runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from rich.console import Console
from rich.table import Table

from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.lease.client import TrainerClient

from .bench_leases import POLICY, write
from .load import quantile
from .proxies import KEYS, Launcher, Target, admin_post, answers, running

REPORT = Path("reports") / "bench_planes.json"
CORES = os.sched_getaffinity(0)
JUNK_BYTES = 300_000_000
JUNK_EVERY_S = 0.1
MIB = 1 << 20
ADMIN = {"Authorization": f"Bearer {KEYS['admin']}"}
PLANES = ("agent", "trainer", "admin")


@dataclass(frozen=True)
class Server:
    """A running `rolltap serve`."""

    urls: dict[str, str]
    pid: int
    keys: list[str]

    def memory_mb(self) -> float:
        """Resident memory of the process and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="utf-8").split()
        return sum(Target("", "", int(pid)).rss_mb() for pid in (self.pid, *children))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Agent calls of one stretch of time; milliseconds and MB. `requests` are those of the work beside them."""

    work: str
    calls: int
    p50: float
    p99: float
    memory: float
    requests: int


async def start(stack: ExitStack, folder: Path) -> Server:
    launcher = Launcher(stack, folder, FOLDER, "qwen3")
    engine = await launcher.engine()
    config, ports = launcher._settings(folder, engine.url, {})
    text = config.read_text(encoding="utf-8").replace("[policies.canned]", f"[policies.{POLICY}]")
    config.write_text(text, encoding="utf-8")
    urls = {plane: f"http://127.0.0.1:{ports[f'{plane}_port']}" for plane in PLANES}
    child = stack.enter_context(running(("tests.bench.proxies", "serve", str(config)), CORES, folder / "log"))
    async with aiohttp.ClientSession() as http:
        while not await answers(http, urls["agent"]):
            if child.poll() is not None:
                raise SystemExit(f"the server did not start: {(folder / 'log').read_text(encoding='utf-8')}")
            await asyncio.sleep(0.1)
    sessions = [await admin_post(urls["admin"], "/sessions") for _ in range(64)]
    return Server(urls, child.pid, [session["key"] for session in sessions])


async def calls_at(server: Server, rate: float, seconds: float) -> list[float]:
    """Latencies in milliseconds of calls that start every 1/`rate` seconds."""
    body = {"model": POLICY, "messages": [{"role": "user", "content": "Look at the next file."}], "max_tokens": 64}
    address = server.urls["agent"] + "/v1/chat/completions"
    latencies: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:

        async def call(due: float, key: str) -> None:
            async with http.post(address, json=body, headers={"Authorization": f"Bearer {key}"}) as reply:
                await reply.read()
                reply.raise_for_status()
            latencies.append((time.perf_counter() - due) * 1000)

        begin, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            due = begin + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(call(due, server.keys[number % len(server.keys)])))
        await asyncio.gather(*tasks)
    return latencies


async def stretch(server: Server, work: str, rate: float, seconds: float, submit_mb: float) -> Stretch:
    """Agent calls beside `work`, which runs in a process of its own."""
    memory = [server.memory_mb()]

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.05)
            memory.append(server.memory_mb())

    command = [sys.executable, "-m", "tests.bench.bench_planes", "--work", work, "--urls", json.dumps(server.urls)]
    command += ["--seconds", str(seconds + 1), "--submit-mb", str(submit_mb)]
    beside = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert beside.stdout is not None
    await beside.stdout.readline()  # its first request is about to start
    watching = asyncio.create_task(watch())
    latencies = await calls_at(server, rate, seconds)
    watching.cancel()
    requests = int((await beside.communicate())[0] or 0)
    p50, p99 = (quantile(latencies, q) for q in (0.5, 0.99))
    return Stretch(work, len(latencies), p50, p99, max(memory) - memory[0], requests)


def junk(urls: dict[str, str], _submit_mb: float) -> Iterator[None]:
    """A large body without a key, to each plane in turn; whether it is refused early is the server's affair."""
    routes = {"agent": "/v1/chat/completions", "trainer": "/leases", "admin": "/rewards"}
    block = b"x" * (1 << 20)
    while True:
        for plane, url in urls.items():
            address = urlsplit(url)
            head = f"POST {routes[plane]} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {JUNK_BYTES}\r\n\r\n"
            with suppress(OSError), socket.create_connection((address.hostname, address.port), 5) as connection:
                connection.sendall(head.encode())
                for _ in range(JUNK_BYTES // len(block)):
                    connection.sendall(block)
            yield


def paced_junk(urls: dict[str, str], submit_mb: float) -> Iterator[None]:
    for _ in junk(urls, submit_mb):
        time.sleep(JUNK_EVERY_S)
        yield


def lease(urls: dict[str, str], _submit_mb: float) -> Iterator[None]:
    client = TrainerClient(urls["trainer"], KEYS["trainer"], "bench")
    while True:
        taken = client.lease(POLICY, groups=16)
        if taken is not None:
            client.release(taken)
        yield


def _session(urls: dict[str, str]) -> tuple[str, str, str]:
    """A group, a session of it, and that session's last call."""
    (group,) = json.loads(_get(urls, "/read/groups?limit=1"))
    rollout = json.loads(_get(urls, f"/read/groups/{group['id']}"))["rollouts"][0]
    session = rollout["session"]["id"]
    return group["id"], session, json.loads(_get(urls, f"/read/sessions/{session}"))["calls"][-1]["id"]


def _get(urls: dict[str, str], path: str) -> bytes:
    import urllib.request

    request = urllib.request.Request(urls["admin"] + path, headers=ADMIN)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return reply.read()


def read(urls: dict[str, str], _submit_mb: float) -> Iterator[None]:
    group, session, call = _session(urls)
    paths = (
        f"/read/calls/{call}/tokens",
        f"/read/sessions/{session}/trajectory",
        f"/read/sessions?limit=1000&search={quote('next file')}",
        f"/view/groups/{group}/file",
    )
    while True:
        for path in paths:
            _get(urls, path)
            yield


def submit(urls: dict[str, str], submit_mb: float) -> Iterator[None]:
    """Many small values, the slowest to check; the policy is unknown, so nothing is queued."""
    task = {"id": "t", "instruction": "look", "spec": {"files": {f"f{n}": "" for n in range(200)}}, "tags": []}
    count = max(1, int(submit_mb * 1e6 / len(json.dumps(task))))
    body = json.dumps({"policy": "nobody", "n": 1, "tasks": [task] * count}).encode()
    while True:
        _post(urls["admin"] + "/tasks", KEYS["admin"], body)
        yield


def odd(urls: dict[str, str], _submit_mb: float) -> Iterator[None]:
    def filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
        return head + unit * ((MIB - len(head) - len(tail)) // len(unit)) + tail

    tasks, call = b'{"policy":"p","n":1,"tasks":[', b'{"token":1,"version":1,"calls":[{"call_id":"c","logprobs":['
    small = b'{"id":"t","instruction":""}'
    to_admin = filled(tasks, b"1,", b"1]}"), filled(tasks, small + b",", small + b"]}")
    to_trainer = filled(call, b"0,", b"0]}]}"), filled(call, b"-0.125,", b"-0.125]}]}")
    while True:
        for body in to_admin:
            _post(urls["admin"] + "/tasks", KEYS["admin"], body)
            yield
        for body in to_trainer:
            _post(urls["trainer"] + "/leases/none/annotations", KEYS["trainer"], body)
            yield


def _post(address: str, key: str, body: bytes) -> None:
    """Sends what is refused."""
    import urllib.error
    import urllib.request

    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(address, data=body, headers=headers), timeout=120).close()


WORKS = {"junk": paced_junk, "flood": junk, "lease": lease, "read": read, "submit": submit, "odd": odd}


def do(work: str, urls: dict[str, str], seconds: float, submit_mb: float) -> None:
    """Runs the work for so long, and prints how many requests that were."""
    requests = WORKS[work](urls, submit_mb) if work in WORKS else None
    print("ready", flush=True)
    deadline, count = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        if requests is None:
            time.sleep(0.1)
        else:
            next(requests)
            count += 1
    print(count)


async def measure(options: argparse.Namespace) -> list[Stretch]:
    stretches: list[Stretch] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "data").mkdir()
        await write(f"sqlite:///{folder / 'data' / 'rolltap.db'}", options.groups)
        server = await start(stack, folder)
        await calls_at(server, options.rate, 2)
        for work in options.works:
            await stretch(server, work, options.rate, 1, options.submit_mb)  # what starts late has started
        for _ in range(options.rounds):
            for work in ("nothing", *options.works):
                stretches.append(await stretch(server, work, options.rate, options.seconds, options.submit_mb))
    return stretches


def rows(stretches: list[Stretch]) -> list[dict[str, Any]]:
    """For each work the medians over the rounds, and of the differences to the same round's stretch of nothing."""
    by_work: dict[str, list[Stretch]] = {}
    for each in stretches:
        by_work.setdefault(each.work, []).append(each)
    quiet = by_work["nothing"]

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 2)

    return [
        {
            "work": work,
            "p50_ms": median([one.p50 for one in some]),
            "p99_ms": median([one.p99 for one in some]),
            "p50_more_ms": median([one.p50 - base.p50 for one, base in zip(some, quiet, strict=True)]),
            "p99_more_ms": median([one.p99 - base.p99 for one, base in zip(some, quiet, strict=True)]),
            "memory_more_mb": median([one.memory for one in some]),
            "requests": median([one.requests for one in some]),
        }
        for work, some in by_work.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32, help="groups on record, of 8 rollouts of 4,096 tokens")
    parser.add_argument("--rate", type=float, default=40, help="agent calls a second")
    parser.add_argument("--seconds", type=float, default=4, help="length of a stretch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--submit-mb", type=float, default=1, help="a body has up to 1 MiB")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--nice", type=int, default=0, help="-15 on a machine that others use, too; needs root")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--urls", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.nice(5 if options.work else options.nice)
    if options.work:
        do(options.work, options.urls, options.seconds, options.submit_mb)
        return
    stretches = asyncio.run(measure(options))
    table = Table("work", "p50", "p99", "p50 more", "p99 more", "memory more", "requests", title="agent calls, in ms")
    results = rows(stretches)
    for row in results:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps({"rows": results, "stretches": [asdict(each) for each in stretches]}, indent=2))


if __name__ == "__main__":
    main()
