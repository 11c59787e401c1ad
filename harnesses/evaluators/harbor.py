"""The `harbor` evaluator: the task's `tests/test.sh`, run as Harbor runs it, and the reward file it writes.

`tests/` appears at `/tests` only after the agent has ended, `/logs/verifier` is empty then, and `test.sh` runs in the
agent's place from its working directory. It writes `/logs/verifier/reward.txt` (a number), or `reward.json` (an object
of numbers, whose `reward`, else the mean, counts; each is kept by name).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rolltap.errors import EvaluatorFailed, TaskInvalid
from rolltap.harnesses.base import Command, Ending, Evidence, Score, Verdict
from rolltap.harnesses.evaluators.command import parse_reward


@dataclass(frozen=True, slots=True)
class HarborCheck:
    """`tests` is the task's folder of that name."""

    tests: Path
    env: dict[str, str] = field(default_factory=dict)
    name: str = "harbor"
    wants_fresh_place: bool = False

    def __post_init__(self) -> None:
        if not (self.tests / "test.sh").is_file():
            raise TaskInvalid(f"{self.tests} holds no test.sh", param="tests")

    async def evaluate(self, evidence: Evidence) -> Verdict:
        scratch = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rollout-harbor-"))
        try:
            logs, tests = scratch / "logs", scratch / "tests"
            (logs / "verifier").mkdir(parents=True)
            await asyncio.to_thread(shutil.copytree, self.tests, tests, symlinks=True)
            launch = Command(("/bin/bash", "/tests/test.sh"), env=self.env, mounts={"/tests": tests, "/logs": logs})
            exit_ = await evidence.place.run(launch, evidence.limits, evidence.limits.evaluate_s)
            if exit_.ending is Ending.TIMED_OUT:
                raise EvaluatorFailed(f"test.sh ran past {evidence.limits.evaluate_s:g} s")
            value, parts = read_reward(logs / "verifier", exit_.output)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        return Verdict((Score(value),), {"code": exit_.code, "output": exit_.output, "parts": parts})


def read_reward(folder: Path, output: str) -> tuple[float, dict[str, float]]:
    """The reward that the verifier wrote, and its parts by name."""
    text, table = folder / "reward.txt", folder / "reward.json"
    if text.is_file() and not text.is_symlink():
        return parse_reward(text.read_text(errors="replace")), {}
    if table.is_file() and not table.is_symlink():
        try:
            given = json.loads(table.read_text(errors="replace"))
            parts = {str(name): parse_reward(str(value)) for name, value in given.items()}
        except (ValueError, AttributeError) as error:
            raise EvaluatorFailed(f"reward.json is not an object of numbers: {error}") from error
        if parts:
            return parts.get("reward", sum(parts.values()) / len(parts)), parts
    raise EvaluatorFailed(f"test.sh wrote no reward: {output.strip()[-300:]}")
