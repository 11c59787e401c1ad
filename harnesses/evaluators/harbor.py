"""The `harbor` evaluator: runs the task's `tests/test.sh` as Harbor does and reads the reward file that it writes.

After the agent has ended, `tests/` appears at `/tests`, `/logs/verifier` is empty, and `test.sh` runs in the agent's
workspace. It writes `/logs/verifier/reward.txt` (a number) or `reward.json` (an object of numbers: `reward`, else
their mean; each is kept by name).
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from rolltap.errors import EvaluatorFailed, TaskInvalid
from rolltap.harnesses.base import Command, Evidence, Score, Verdict
from rolltap.harnesses.evaluators.command import parse_reward
from rolltap.harnesses.output import Transcript, last_line, read_output


@dataclass(frozen=True, slots=True)
class HarborCheck:
    """`tests` is the task's folder of that name."""

    tests: Path
    env: dict[str, str] = field(default_factory=dict)
    name: str = "harbor"
    needs_clean_workspace: bool = False

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
            exit_ = await evidence.run(evidence.workspace, "test.sh", launch)
            value, parts = read_reward(logs / "verifier", exit_.output, evidence.seen)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
        return Verdict((Score(value),), {"code": exit_.code, "parts": parts})


def read_reward(folder: Path, output: str, seen: Transcript) -> tuple[float, dict[str, float]]:
    """The reward that the verifier wrote, and its parts by name."""
    text, table = folder / "reward.txt", folder / "reward.json"
    if text.is_file() and not text.is_symlink():
        written = read_output(text)
        seen.add(text.name, written)
        return parse_reward(written), {}
    if table.is_file() and not table.is_symlink():
        written = read_output(table)
        seen.add(table.name, written)
        try:
            given = json.loads(written)
            parts = {str(name): parse_reward(str(value)) for name, value in given.items()}
        except (ValueError, AttributeError) as error:
            raise EvaluatorFailed(f"reward.json is not an object of numbers: {error}") from error
        if parts:
            return parts.get("reward", sum(parts.values()) / len(parts)), parts
    raise EvaluatorFailed(f"test.sh wrote no reward: {last_line(output)}")
