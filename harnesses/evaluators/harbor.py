"""The `harbor` evaluator: runs the task's `tests/test.sh` as Harbor does, and reads the reward file that it writes.

After the agent has ended, `tests/` is mounted at `/tests`, `/logs/verifier` is empty, and `test.sh` runs in the agent's
workspace. It writes `/logs/verifier/reward.txt` (a number) or `reward.json` (an object of numbers by name, all of which
are recorded; `chosen_reward` selects the one that counts).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from rolltap.errors import EvaluatorFailed, NoReward, TaskInvalid
from rolltap.harnesses.base import Command, Evidence, Score, Transcript, Verdict, last_line
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.base import CodePlace, EvaluatorTable
from rolltap.harnesses.evaluators.programs import place_of, run_program
from rolltap.harnesses.evaluators.rewards import check_reward, parse_reward, read_reward
from rolltap.harnesses.left_files import remove
from rolltap.harnesses.runtimes.code_sandbox import VARIABLE
from rolltap.harnesses.runtimes.sources import located
from rolltap.harnesses.threads import in_thread


class HarborCheck(EvaluatorTable, tag="harbor", frozen=True):
    """`tests` is the task's folder of that name; `env` is added to the environment of `test.sh`.

    `reward_key` is the key of `reward.json` that counts. It is needed if there are several and none is `reward`.
    `takes`: patterns of the changes that come in (`intake.py`); () for the allow-list.
    """

    example = '{"kind": "harbor", "tests": "tests"}'
    code_place = CodePlace.APART

    tests: str
    env: dict[str, str] = msgspec.field(default_factory=dict)
    reward_key: str = ""
    takes: tuple[str, ...] = ()

    @property
    def needs_clean_workspace(self) -> bool:
        return bool(self.takes) or VARIABLE in self._source

    @property
    def _source(self) -> str:
        return (Path(self.tests) / "test.sh").read_text(encoding="utf-8", errors="replace")

    def resolve_paths(self, base: Path) -> HarborCheck:
        return msgspec.structs.replace(self, tests=str(located(base, self.tests).absolute()))

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.tests,)

    def build(self, client: AdminClient) -> HarborCheck:
        if not (Path(self.tests) / "test.sh").is_file():
            raise TaskInvalid(f"{self.tests} holds no test.sh", param="tests")
        return self

    async def evaluate(self, evidence: Evidence) -> Verdict:
        place, about = await place_of(evidence, self._source, self.takes)
        scratch = Path(await in_thread(tempfile.mkdtemp, prefix="rollout-harbor-"))
        try:
            logs, tests = scratch / "logs", scratch / "tests"
            (logs / "verifier").mkdir(parents=True)
            await in_thread(shutil.copytree, self.tests, tests, symlinks=True)
            launch = Command(("/bin/bash", "/tests/test.sh"), env=self.env, mounts={"/tests": tests, "/logs": logs})
            end = await run_program(evidence, place, "test.sh", launch)
            exit_ = end.exit
            with end.blamed():
                end.check_ran("test.sh")
                parts = read_rewards(logs / "verifier", exit_.output, evidence.seen)
                value = chosen_reward(parts, self.reward_key)
        finally:
            await in_thread(remove, scratch)
        return Verdict((Score(value),), {"code": exit_.code, "parts": parts, **about, **end.detail})


def read_rewards(folder: Path, output: str, seen: Transcript) -> dict[str, float]:
    """The rewards that the verifier wrote to `folder`, by name; `reward.txt` has `reward`. Ignores links.

    Raises `NoReward` if there is none.
    """
    if (text := read_reward(folder, "reward.txt")) is not None:
        seen.add("reward.txt", text)
        return {"reward": parse_reward(text)}
    if (text := read_reward(folder, "reward.json")) is not None:
        seen.add("reward.json", text)
        try:
            pairs = json.loads(text, object_pairs_hook=tuple)
            parts = {name: parse_reward(str(value)) for name, value in pairs}
        except (ValueError, TypeError, RecursionError) as error:
            raise NoReward(f"reward.json is not an object of numbers: {error}") from error
        if not isinstance(pairs, tuple) or len(parts) < len(pairs):
            raise NoReward("reward.json is not an object with each name once")
        if parts:
            return parts
    raise NoReward(f"test.sh wrote no reward: {last_line(output)}")


def chosen_reward(rewards: Mapping[str, float], key: str = "") -> float:
    """The reward that counts: that of `key` if it is set, else `reward`, else the only one.

    Raises `EvaluatorFailed` if several are left: a mean of different rewards would train an unintended objective.
    `NoReward` if it is too large.
    """
    known = ", ".join(sorted(rewards)) or "none"
    if key:
        if key not in rewards:
            raise EvaluatorFailed(f"there is no reward {key!r}; the rewards are {known}")
        return check_reward(rewards[key])
    if "reward" in rewards:
        return check_reward(rewards["reward"])
    if len(rewards) != 1:
        raise EvaluatorFailed(f"which reward counts? The rewards are {known}: name one (reward_key, --reward-key)")
    return check_reward(next(iter(rewards.values())))
