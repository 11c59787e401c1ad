"""docs/trainers.md: its programs, run as they stand against a real server and engine; and its table."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from rolltap.demo.stack import Stack
from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.adapters import ADAPTERS

from ..acceptance.playing import POLICIES, POLICY, Player
from .proofs import PAGE, SUITES, code, page

STEPPING = ["trl-grpo", "trl-async"]


def environment(stack: Stack, out: Path, steps: int) -> dict[str, str]:
    return {
        "ROLLTAP_TRAINER_URL": stack.trainer_url,
        "ROLLTAP_TRAINER_KEY": stack.keys["trainer"],
        "MODEL": str(FOLDER),
        "OUT": str(out),
        "STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
    }


def served(stack: Stack) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {stack.keys['trainer']}"}
    return httpx.get(f"{stack.trainer_url}/policies/{POLICY}", headers=headers).json()


def test_the_table_says_what_the_suite_proves() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "python -m tests.trainers.proofs"
    assert set(SUITES) == set(ADAPTERS)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of transformers and TRL about themselves
def test_each_program_makes_its_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other on one server: the second takes the policy over and begins anew, with new groups."""
    with Stack(tmp_path, FOLDER, POLICIES) as stack, Player(stack):
        for number, name in enumerate(STEPPING):
            for variable, value in environment(stack, tmp_path / name, 2).items():
                monkeypatch.setenv(variable, value)
            text = code(name).replace('policy="tiny"', f'policy="tiny", take_over={number > 0}')
            exec(compile(text, name, "exec"), {})
            state = served(stack)
            assert state["paused"] is None
            assert state["groups"]["acknowledged"] == 4, "two steps of two groups"  # type: ignore[index]
        assert served(stack)["version"] == 5  # 1 and 2, then the base as 3, and two steps from there


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STEPPING)
def test_it_is_killed_at_any_moment_and_goes_on(tmp_path: Path, name: str) -> None:
    script, out, chance = tmp_path / "mine.py", tmp_path / "out", random.Random(name)
    script.write_text(code(name), encoding="utf-8")

    def checkpoints() -> int:
        return max((int(path.parent.name[11:]) for path in out.glob("checkpoint-*/trainer_state.json")), default=0)

    def start(stack: Stack, steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(script)]
        return subprocess.Popen(
            command, env={**os.environ, **environment(stack, out, steps)}, stderr=subprocess.PIPE, text=True
        )

    with Stack(tmp_path, FOLDER, POLICIES) as stack, Player(stack):
        for _ in range(3):
            before, run = checkpoints(), start(stack, 1000)
            while checkpoints() <= before:
                assert run.poll() is None, run.communicate()[1]
                time.sleep(0.05)
            time.sleep(chance.uniform(0.0, 1.0))
            run.kill()
            run.communicate()
        steps = checkpoints() + 2
        last = start(stack, steps)
        _, errors = last.communicate(timeout=200)
        assert last.returncode == 0, errors
        state = served(stack)
        assert state["paused"] is None
        assert state["groups"]["acknowledged"] == 2 * steps, "each step's groups, each once"  # type: ignore[index]
