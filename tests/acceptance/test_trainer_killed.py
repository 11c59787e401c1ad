"""`rolltap train`, killed in the middle of a run and started again, goes on; nothing is trained twice or lost."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltap.demo.stack import Process, Stack
from rolltap.engine.tiny import FOLDER

from .playing import POLICIES, POLICY, Player

GROUPS = 2


def start(stack: Stack, out: Path, steps: int) -> Process:
    options = {
        "policy": POLICY,
        "model": FOLDER,
        "out": out,
        "steps": steps,
        "groups": GROUPS,
        "lr": 1e-4,
        "threads": 1,
    }
    command = [sys.executable, "-m", "rolltap", "train", "--url", stack.trainer_url]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {"ROLLTAP_TRAINER_KEY": stack.keys["trainer"], "OMP_NUM_THREADS": "1"}
    return Process.start("trainer", command, stack.folder, environment)


def metrics(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for_steps(trainer: Process, out: Path, steps: int) -> None:
    """Until the steps are made, and a checkpoint is there to go on from: it is written after its step's line."""
    while len(metrics(out)) < steps or not any((out / "checkpoints").glob("step-*")):
        assert trainer.child.poll() is None, trainer.log.read_text()
        time.sleep(0.05)


def kill_and_go_on(folder: Path, kills: int, seed: int) -> None:
    out, chance = folder / "train", random.Random(seed)
    with Stack(folder, FOLDER, POLICIES) as stack, Player(stack):
        done = 0
        for _ in range(kills):
            trainer = start(stack, out, 1000)
            wait_for_steps(trainer, out, done + 1)
            time.sleep(chance.uniform(0.0, 1.0))
            trainer.child.kill()
            trainer.child.wait()
            done = len(metrics(out))
        reached = max(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*"))
        last = start(stack, out, reached + 2)
        assert last.child.wait(90) == 0, last.log.read_text()
        steps = [one["step"] for one in metrics(out)]
        assert steps == sorted(set(steps)), "a step was made twice"
        assert steps[-1] == reached + 2
        headers = {"Authorization": f"Bearer {stack.keys['trainer']}"}
        served = httpx.get(f"{stack.trainer_url}/policies/{POLICY}", headers=headers).json()
        assert (served["version"], served["paused"]) == (reached + 2, None)
        assert served["groups"]["acknowledged"] == GROUPS * (reached + 2), "each step's groups, each once"
        assert not list(out.rglob(".making-*"))


@pytest.mark.timeout(180)
def test_killed_once_it_goes_on(tmp_path: Path) -> None:
    """22 CPU seconds: trainers and servers are processes that start several times."""
    kill_and_go_on(tmp_path, kills=1, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_at_many_moments_it_goes_on(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, kills=20, seed=2)
