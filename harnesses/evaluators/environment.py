"""The `environment` evaluator: the scorer of an environment of another package gives the reward.

If the environment's own loop played the task, the loop's output holds the signed result. If a harness did the task, the
scorer runs after the agent has ended, in a process and a folder that the agent never saw.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rolltap.errors import NoReward, TaskInvalid
from rolltap.harnesses.agents.environments import (
    NAME,
    EnvironmentLoop,
    EnvironmentStep,
    package_of,
    proof_key,
    signed_result,
)
from rolltap.harnesses.base import Evidence, Score, Verdict, last_line
from rolltap.harnesses.client import AdminClient
from rolltap.harnesses.evaluators.base import EvaluatorTable
from rolltap.harnesses.evaluators.harbor import chosen_reward
from rolltap.harnesses.evaluators.rewards import check_reward, parse_reward
from rolltap.harnesses.runtimes.process import ProcessRuntime
from rolltap.harnesses.runtimes.sources import Empty, located


class EnvironmentCheck(EvaluatorTable, tag="environment", frozen=True):
    """Names task `sample` of the environment `where`: a name or `FILE.py`, with `@NAME` if that has several.

    `options` are the package's own settings of the environment; `python` is the interpreter that has the package.
    `reward_key` names the score that counts, if there are several.
    """

    example = '{"kind": "environment", "package": "verifiers", "where": "gsm8k", "sample": 0}'

    package: str
    where: str
    sample: int | str = 0
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    python: str = "python3"
    reward_key: str = ""

    def check(self, policies: Collection[str]) -> None:
        package_of(self.package)

    def resolve_paths(self, base: Path) -> EnvironmentCheck:
        file, mark, name = self.where.partition("@")
        if not file.endswith(".py"):
            return self
        return msgspec.structs.replace(self, where=f"{located(base, file).absolute()}{mark}{name}")

    @property
    def paths(self) -> tuple[str, ...]:
        file = self.where.partition("@")[0]
        return (file,) if file.endswith(".py") else ()

    @property
    def step(self) -> EnvironmentStep:
        return EnvironmentStep(
            self.package, self.python, {"where": self.where, "sample": self.sample, "options": self.options}
        )

    def loop(self) -> EnvironmentLoop:
        """The harness that plays the task in the environment's own loop."""
        return EnvironmentLoop(self.step)

    def check_answers(self) -> None:
        """Raises `TaskInvalid` if the package has no scorer for a harness's answer, only a loop of its own."""
        if not package_of(self.package).scores:
            raise TaskInvalid(f"{self.package} plays its own episodes: leave the harness out", param="harness")

    def build(self, client: AdminClient) -> EnvironmentScorer:
        return EnvironmentScorer(self, client)


@dataclass(frozen=True, slots=True)
class EnvironmentScorer:
    """Reads the score of the environment's loop, or lets the environment's scorer judge the model's last answer.

    The answer comes from the record, not from the agent.
    """

    settings: EnvironmentCheck
    client: AdminClient
    name: str = NAME
    needs_clean_workspace: bool = False
    reward_files: tuple[str, ...] = ()

    async def evaluate(self, evidence: Evidence) -> Verdict:
        if evidence.harness == NAME:
            output, key = evidence.exit.output, proof_key(evidence.session_id)
        else:
            output, key = await self._score(evidence)
        package = self.settings.package
        result = signed_result(output, key)
        if result is None:
            raise NoReward(f"the {package} environment gave no result: {last_line(output)}")
        if result.get("error"):
            raise NoReward(f"the {package} environment failed: {last_line(str(result['error']))}")
        parts, reward_key = result.get("parts", {}), self.settings.reward_key
        value = chosen_reward(parts, reward_key) if reward_key or "reward" not in result else result["reward"]
        role_rewards = {f"role:{name}": reward for name, reward in result.get("roles", {}).items()}
        rewards = {"rollout": value, **role_rewards}
        scores = tuple(Score(check_reward(parse_reward(str(value))), scope) for scope, value in rewards.items())
        return Verdict(scores, {"parts": parts, "metrics": result.get("metrics", {})})

    async def _score(self, evidence: Evidence) -> tuple[str, str]:
        """Runs the scorer on the recorded answer. Returns its output and the key that signs its result."""
        answer = await self.client.answer(evidence.session_id) if evidence.session_id else ""
        evidence.seen.add("the answer", answer)
        step, key = self.settings.step, secrets.token_hex(32)
        values = {**step.values, "answer": answer, "instruction": evidence.task.instruction}
        workspace = await ProcessRuntime().prepare(Empty())
        try:
            launch = replace(step, values=values).command("score", workspace.home, key)
            exit_ = await evidence.run(workspace, f"the scorer of {self.settings.package}", launch)
        finally:
            await workspace.close()
        return exit_.output, key
