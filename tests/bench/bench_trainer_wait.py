"""How long the trainer waits for rollouts: `python -m tests.bench.bench_trainer_wait`. Writes its report as JSON.

`rolltap train` on the tiny model at staleness 1, `rolltap serve` on SQLite, and a scripted engine that answers after
50 ms with `TOKENS` random tokens, so that rollouts cost next to no CPU, as if they were made on another machine. The
rollouts are calls over HTTP with a reward, as many at once as the ledger lets be outstanding. The first `WARM_UP`
steps, in which the pipeline fills, are left out; the rest is split into the parts of `seconds/*` in the metrics.
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
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from rolltap import __version__
from rolltap.demo.stack import Process
from rolltap.engine.tiny import FOLDER

from ..conftest import free_port

REPORT = Path("reports") / "bench_trainer_wait.json"
POLICY = "bench"
GOAL = 0.1
GROUPS = 4
ROLLOUTS = 8
TOKENS = 512
WARM_UP = 2

SCRIPT = f"""
import random
from rolltap.engine.scripted.script import ScriptedReply

def reply(prompt):
    ids = random.Random(prompt.session).choices(range(300, 800), k={TOKENS})
    return ScriptedReply(ids=tuple(ids), delay_s=0.05, tokens_per_event={TOKENS})
"""


class Players:
    """Opens groups for as long as the ledger wants any, and plays their rollouts at once."""

    def __init__(self, admin_url: str, key: str) -> None:
        self._url = admin_url
        self._headers = {"Authorization": f"Bearer {key}"}

    async def play(self, trainer: Process) -> None:
        """Until the trainer has ended."""
        playing: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession(raise_for_status=False) as http:
            while trainer.child.poll() is None:
                group = await self._post(http, "/groups", self._new_group())
                if group is None:
                    await asyncio.sleep(0.05)
                    continue
                for rollout in group["rollouts"]:
                    task = asyncio.create_task(self._roll_out(http, rollout))
                    playing.add(task)
                    task.add_done_callback(playing.discard)
            await asyncio.gather(*playing)

    def _new_group(self) -> dict[str, Any]:
        task = {"id": f"task-{time.monotonic_ns()}", "instruction": "say something", "spec": {}, "tags": []}
        return {"policy": POLICY, "n": ROLLOUTS, "task": task}

    async def _roll_out(self, http: aiohttp.ClientSession, rollout: dict[str, Any]) -> None:
        begun = await self._post(http, f"/rollouts/{rollout['id']}/start", {"ttl": 600})
        assert begun is not None
        body = {"model": POLICY, "messages": [{"role": "user", "content": "Say something."}]}
        headers = {"Authorization": f"Bearer {begun['key']}"}
        async with http.post(f"{begun['base_url']}/v1/chat/completions", json=body, headers=headers) as answer:
            answer.raise_for_status()
            await answer.read()
        await self._post(http, "/rewards", {"rollout_id": rollout["id"], "value": float(rollout["index"] % 2)})
        ending = {"status": "succeeded", "attempt": begun["attempt"]}
        await self._post(http, f"/rollouts/{rollout['id']}/finish", ending)

    async def _post(self, http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None where there is no room for more."""
        async with http.post(self._url + path, json=body, headers=self._headers) as answer:
            if answer.status == 429:
                return None
            answer.raise_for_status()
            return await answer.json()


def start_servers(folder: Path, stack: ExitStack) -> dict[str, str]:
    """The scripted engine and the server before it; the planes' URLs."""
    ports = dict(zip(("engine", "agent", "trainer", "admin"), (free_port() for _ in range(4)), strict=True))
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    (folder / "script.py").write_text(SCRIPT)
    (folder / "rolltap.toml").write_text(
        f'data = "{folder}"\n[listen]\n'
        + "".join(f"{plane}_port = {ports[plane]}\n" for plane in ("agent", "trainer", "admin"))
        + f'[engines.main]\nurl = "{urls["engine"]}"\n[policies.{POLICY}]\nengine = "main"\nmodel = "scripted"\n'
        f'tokenizer = "{FOLDER}"\nfamily = "qwen3"\ntrain = ["tool_call_unparsable", "length_truncated"]\n'
    )
    engine = ["rolltap.engine.scripted", "--script", str(folder / "script.py"), "--tokenizer", str(FOLDER)]
    for name, arguments, url in (
        ("engine", [*engine, "--port", str(ports["engine"])], urls["engine"]),
        ("server", ["rolltap", "serve", "--config", str(folder / "rolltap.toml")], urls["admin"]),
    ):
        process = Process.start(name, [sys.executable, "-m", *arguments], folder)
        stack.callback(process.stop)
        process.wait_for(f"{url}/health")
    return urls


def start_trainer(folder: Path, url: str, key: str, steps: int) -> Process:
    options = {
        "policy": POLICY, "model": FOLDER, "out": folder / "out", "url": url, "steps": steps, "groups": GROUPS,
        "max-staleness": 1, "threads": 1,
    }  # fmt: skip
    command = [sys.executable, "-m", "rolltap", "train"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return Process.start("trainer", command, folder, {"ROLLTAP_TRAINER_KEY": key, "OMP_NUM_THREADS": "1"})


def measure(steps: int) -> list[dict[str, Any]]:
    """The metrics of the steps after the warm-up."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        urls = start_servers(folder, stack)
        keys = tomllib.loads((folder / "keys.toml").read_text())
        trainer = start_trainer(folder, urls["trainer"], keys["trainer"], WARM_UP + steps)
        stack.callback(trainer.stop)
        asyncio.run(Players(urls["admin"], keys["admin"]).play(trainer))
        trainer.check()
        lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP:]


def split(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds a step by part."""
    return {name: sum(step["seconds"][name] for step in steps) / len(steps) for name in steps[0]["seconds"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args(arguments)
    steps = measure(options.steps)
    parts = split(steps)
    whole = sum(parts.values())
    table = Table("part", "s a step", "share", title=f"{len(steps)} steps of {GROUPS * ROLLOUTS} rollouts")
    for name, seconds in parts.items():
        table.add_row(name, f"{seconds:.3f}", f"{seconds / whole:.1%}")
    Console().print(table)
    options.report.parent.mkdir(exist_ok=True)
    about = {
        "goal_wait_share": GOAL, "staleness": [step["staleness"] for step in steps], "cores": os.cpu_count(),
        "tokens": sum(step["tokens"] for step in steps), "version": __version__, "python": platform.python_version(),
        "time": time.time(),
    }  # fmt: skip
    options.report.write_text(json.dumps({"seconds": parts, "wait_share": parts["wait"] / whole, **about}, indent=2))


if __name__ == "__main__":
    main()
