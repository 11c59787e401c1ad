"""The trainer of docs/bring-your-own-trainer.md, run as it stands there against a real proxy and engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rolltap.demo.stack import Stack
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.lease.client import TrainerClient
from rolltap.trainer_client.lease.push import push_folder

from .playing import POLICIES, POLICY, Player

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-own-trainer.md"


def code() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return block


def test_the_page_says_how_to_set_all_that_the_code_reads() -> None:
    (start,) = re.findall(r"```\n(.*?python mine\.py\n)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert all(name in start for name in re.findall(r"environ\[\"(\w+)\"\]", code()))


def test_the_contract_fits_in_forty_lines() -> None:
    assert len([line for line in code().splitlines() if line.strip()]) <= 40


def start(script: Path, stack: Stack, out: Path, steps: int) -> subprocess.Popen[str]:
    environment = {
        "ROLLTAP_TRAINER_URL": stack.trainer_url,
        "ROLLTAP_TRAINER_KEY": stack.keys["trainer"],
        "POLICY": POLICY,
        "MODEL": str(FOLDER),
        "OUT": str(out),
        "STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True
    )


def policy_of(stack: Stack) -> Any:
    headers = {"Authorization": f"Bearer {stack.keys['trainer']}"}
    return httpx.get(f"{stack.trainer_url}/policies/{POLICY}", headers=headers).json()


@pytest.mark.timeout(240)
def test_it_trains_is_killed_and_goes_on(tmp_path: Path) -> None:
    """24 CPU seconds: trainers and servers are processes that start several times."""
    script, out = tmp_path / "mine.py", tmp_path / "out"
    script.write_text(code(), encoding="utf-8")
    out.mkdir()
    with Stack(tmp_path, FOLDER, POLICIES) as stack, Player(stack):
        first = start(script, stack, out, 1000)
        while not (out / "step-2").exists():
            assert first.poll() is None, first.communicate()[1]
            time.sleep(0.05)
        first.kill()
        first.communicate()
        reached = max(int(path.name[5:]) for path in out.glob("step-*"))
        second = start(script, stack, out, reached + 2)
        _, said = second.communicate(timeout=120)
        assert second.returncode == 0, said
        served = policy_of(stack)
        assert (served["version"], served["paused"]) == (reached + 2, None)
        assert reached + 2 <= served["groups"]["acknowledged"] <= 2 * (reached + 2)


@pytest.mark.timeout(240)
def test_it_takes_over_a_policy_that_another_trainer_pushed(tmp_path: Path) -> None:
    """Engines have weights that its rewind abandons, whose tokens no lease has. 20 CPU seconds, as above."""
    script, out = tmp_path / "mine.py", tmp_path / "out"
    script.write_text(code().replace("{POLICY: step})", "{POLICY: step}, take_over=True)"), encoding="utf-8")
    out.mkdir()
    with Stack(tmp_path, FOLDER, POLICIES) as stack:
        other = TrainerClient(stack.trainer_url, stack.keys["trainer"], "other", run="other")
        other.rewind(0, {POLICY: 0})
        push_folder(other, POLICY, FOLDER, 1, "keep")
        with Player(stack):
            trainer = start(script, stack, out, 4)
            try:
                _, said = trainer.communicate(timeout=120)
            finally:
                trainer.kill()
        assert trainer.returncode == 0, said
        assert (policy_of(stack)["version"], policy_of(stack)["owner"]) == (4, "mine")
