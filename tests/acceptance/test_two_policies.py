"""Two real `rolltap train`, a policy each, on the same rollouts: one is killed at any moment, and both lose nothing."""

from __future__ import annotations

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
from .test_trainer_killed import metrics, wait_for_steps

GROUPS = 2
CAST = {"solver": "a", "critic": "b"}
TWO = {name: {**POLICIES[POLICY], "engine": engine} for name, engine in (("a", "local"), ("b", "second"))}


def start(stack: Stack, policy: str, steps: int) -> Process:
    options = {"policy": policy, "model": FOLDER, "out": stack.folder / policy, "steps": steps, "groups": GROUPS}
    options |= {"name": policy, "lr": 1e-4, "threads": 1, "max-staleness": 1}
    command = [sys.executable, "-m", "rolltap", "train", "--url", stack.trainer_url]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    environment = {"ROLLTAP_TRAINER_KEY": stack.keys["trainer"], "OMP_NUM_THREADS": "1"}
    return Process.start(policy, command, stack.folder, environment)


def state(stack: Stack, policy: str) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {stack.keys['trainer']}"}
    return httpx.get(f"{stack.trainer_url}/policies/{policy}", headers=headers).raise_for_status().json()


def kill_and_go_on(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    with Stack(folder, FOLDER, TWO, more_engines=("second",)) as stack, Player(stack, policy=CAST):
        running = {policy: start(stack, policy, 1000) for policy in ("a", "b")}
        for number in range(kills):
            victim, other = ("b", "a") if number % 2 == 0 else ("a", "b")
            done = {policy: len(metrics(folder / policy)) for policy in running}
            for policy, trainer in running.items():
                wait_for_steps(trainer, folder / policy, done[policy] + 1)
            time.sleep(chance.uniform(0.0, 1.0))
            running[victim].child.kill()
            running[victim].child.wait()
            assert running[other].child.poll() is None, running[other].log.read_text()
            running[victim] = start(stack, victim, 1000)
        for policy, trainer in running.items():
            wait_for_steps(trainer, folder / policy, len(metrics(folder / policy)) + 1)
            trainer.child.terminate()
            assert trainer.child.wait(90) == 0, trainer.log.read_text()
        for policy in ("a", "b"):
            steps = [one["step"] for one in metrics(folder / policy)]
            assert steps == list(range(1, len(steps) + 1)), "a step is missing, or was made twice"
            served = state(stack, policy)
            assert (served["version"], served["paused"], served["owner"]) == (len(steps), None, f"{policy}")
            assert served["groups"]["acknowledged"] == GROUPS * len(steps), "each step's groups, each once"
            assert served["groups"].get("dead", 0) == 0
            lines = metrics(folder / policy)
            assert all(line["mismatch_mean"] is None or line["mismatch_mean"] < 1e-3 for line in lines)


@pytest.mark.timeout(240)
def test_one_of_two_trainers_is_killed_and_neither_loses_a_group(tmp_path: Path) -> None:
    """51 CPU seconds: two trainers, two engines and a server are processes, and a trainer starts twice."""
    kill_and_go_on(tmp_path, kills=1, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_both_trainers_are_killed_at_many_moments(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, kills=20, seed=2)
