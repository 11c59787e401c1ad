"""Two real `rolltap train` for one policy: the second is refused; told to take over, it goes on and the first is.

The quick twins are tests/contract/test_ownership.py, on the ledger, and test_run.py, on the folder's lock.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from rolltap.demo.stack import Process, Stack
from rolltap.engine.tiny import FOLDER

from .playing import POLICIES, POLICY, Player
from .test_trainer_killed import metrics, wait_for_steps


def start(stack: Stack, name: str, steps: int, *more: str) -> Process:
    command = [sys.executable, "-m", "rolltap", "train", "--url", stack.trainer_url, "--policy", POLICY]
    command += ["--model", str(FOLDER), "--out", str(stack.folder / name), "--name", name, "--steps", str(steps)]
    command += ["--groups", "1", "--lr", "1e-4", "--threads", "1", *more]
    environment = {"ROLLTAP_TRAINER_KEY": stack.keys["trainer"], "OMP_NUM_THREADS": "1"}
    return Process.start(name, command, stack.folder, environment)


def said(trainer: Process, *, code: int) -> str:
    assert trainer.child.wait(60) == code, trainer.log.read_text()
    return " ".join(trainer.log.read_text().split())


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_second_trainer_is_refused_until_it_takes_over(tmp_path: Path) -> None:
    with Stack(tmp_path, FOLDER, POLICIES) as stack, Player(stack):
        first = start(stack, "one", 1000)
        wait_for_steps(first, tmp_path / "one", 1)
        assert f"policy '{POLICY}' is trained by 'one' since" in said(start(stack, "two", 2), code=1)
        wait_for_steps(first, tmp_path / "one", len(metrics(tmp_path / "one")) + 1)
        assert "another process trains in" in said(start(stack, "one", 2), code=1)
        second = start(stack, "two", 2, "--take-over")
        assert f"policy '{POLICY}' is trained by 'two' since" in said(first, code=1)
        said(second, code=0)
        served = [
            version for name in ("one", "two") for version in (line["version"] for line in metrics(tmp_path / name))
        ]
        assert len(set(served)) == len(served), "one number for two sets of weights"
        headers = {"Authorization": f"Bearer {stack.keys['trainer']}"}
        state = httpx.get(f"{stack.trainer_url}/policies/{POLICY}", headers=headers).json()
        assert (state["owner"], state["version"], state["paused"]) == ("two", max(served), None)
        lost = state["groups"]["acknowledged"] - len(served)
        assert lost in (0, 1), "the first one had acknowledged the step whose weights were refused"
