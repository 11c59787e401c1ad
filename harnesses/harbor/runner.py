"""Runs groups of Harbor trials. A trial is an attempt of a rollout; Harbor's verifier gives its reward.

Harbor's result says how a trial ended. A trial whose agent failed is graded. If the verifier failed, the rollout has no
reward: it counts 0 in the baseline, as after every other error once the agent has run, since what the agent left may
be the cause. Errors before that (sandbox, installation), and a server that is away, are infrastructure failures, after
which the ledger allows another attempt.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import litellm
from harbor.agents.factory import AgentFactory
from harbor.models.agent.name import AgentName
from harbor.models.environment_type import EnvironmentType
from harbor.models.job.config import DatasetConfig
from harbor.models.task.task import Task as HarborTask
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.models.trial.result import TrialResult
from harbor.tasks.client import TaskClient
from harbor.trial.trial import Trial

from rolltap.contract.admin import NOTHING_SAMPLED
from rolltap.contract.rules import NO_RULES, SessionRules
from rolltap.errors import EvaluatorFailed, NoReward, RuntimeFailed, TaskInvalid, Unreadable
from rolltap.harnesses.base import Limits, Score, Verdict, last_line
from rolltap.harnesses.evaluators.harbor import chosen_reward
from rolltap.harnesses.harbor.agent import CapturedAgent
from rolltap.harnesses.harbor.environment import JUDGEMENT, SANDBOX, BubblewrapEnvironment, build_steps_of
from rolltap.harnesses.harbor.names import connection_to
from rolltap.harnesses.runner.attempts import AWAY, AttemptRunner, Result, RolloutState, Stage
from rolltap.harnesses.runner.specs import SAMPLE_JOB, parse_spec
from rolltap.harnesses.runner.tasks import harbor_task, task_folders
from rolltap.harnesses.threads import in_own_loop, in_thread, on_loop
from rolltap.tampering import TamperingAct, TamperingKind
from rolltap.types import UNPROTECTED, Cause, RolloutStatus, Task

SETUP_S = 360.0
"""Seconds that Harbor allows for installing an agent. The key is created before that, so it lives longer by them."""

litellm.suppress_debug_info = True  # otherwise it prints help when it looks up a model's provider
BESIDE = "Harbor runs test.sh beside what it starts"
TIMED_OUT = "AgentTimeoutError"
OF_AGENT = {
    "NonZeroAgentExitCodeError",
    "ContextWindowExceededError",
    "ContextLengthExceededError",
    "OutputTokenExceededError",
    "OutputLengthExceededError",
    "AgentSafetyRefusalError",
}
OF_VERIFIER = {"VerifierTimeoutError", "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError"}
"""`TIMED_OUT`, `OF_AGENT` and `OF_VERIFIER` are names of Harbor's error classes, as its results hold them."""


@dataclass(frozen=True, slots=True)
class Player:
    """A Harbor agent, which takes the place of a harness. The record calls it `harbor/NAME`."""

    agent: str
    dialect: str = ""

    @property
    def name(self) -> str:
        return f"harbor/{self.agent}"


@dataclass(frozen=True, slots=True)
class Grader:
    """Harbor's verifier, which takes the place of an evaluator. `reward_key` as in `chosen_reward`."""

    reward_key: str = ""
    name: str = "harbor"

    def verdict(self, result: TrialResult, judgement: Mapping[str, Any]) -> Verdict | None:
        """The verdict of a trial; None if it has no rewards. Raises `EvaluatorFailed` without the one that counts.

        `judgement`: what our environment says about the verifier's run; empty from others.
        """
        rewards = result.verifier_result.rewards if result.verifier_result else None
        if not rewards:
            return None
        values = {name: float(value) for name, value in rewards.items()}
        detail = {"parts": values, "trial": result.trial_name, UNPROTECTED: BESIDE, **judgement}
        if not detail[UNPROTECTED]:
            del detail[UNPROTECTED]
        return Verdict((Score(chosen_reward(values, self.reward_key)),), detail)


@dataclass(frozen=True, slots=True)
class TrialWork:
    """The settings of a task's trials. `folder` is the task's folder; `jobs` is the parent of the trials' folders."""

    task: Task
    folder: Path
    harness: Player
    evaluator: Grader
    limits: Limits
    environment: EnvironmentConfig
    jobs: Path
    rules: SessionRules = NO_RULES

    def trial(self) -> TrialConfig:
        """Harbor's configuration of one trial."""
        path = f"{CapturedAgent.__module__}:{CapturedAgent.__name__}"
        agent = AgentConfig(import_path=path, kwargs=asdict(self.harness))
        task = TaskConfig(path=self.folder)
        return TrialConfig(task=task, trials_dir=self.jobs, agent=agent, environment=self.environment)


def environment_of(runtime: str, agent: str) -> EnvironmentConfig:
    """Our sandbox if `runtime` is "", `auto` or `bubblewrap`; otherwise Harbor's environment of that name.

    Raises `RuntimeFailed` if this machine can't run the sandbox, `TaskInvalid` if Harbor has no such environment.
    """
    if runtime in ("", "auto", SANDBOX):
        BubblewrapEnvironment.runtime_for(agent)
        path = f"{BubblewrapEnvironment.__module__}:{BubblewrapEnvironment.__name__}"
        return EnvironmentConfig(import_path=path, kwargs={"harness": agent})
    try:
        return EnvironmentConfig(type=EnvironmentType(runtime))
    except ValueError:
        raise TaskInvalid(f"Harbor has no environment {runtime!r}; ours is {SANDBOX}", param="runtime") from None


def check_player(player: Player) -> None:
    """Raises `TaskInvalid` if Harbor does not have the agent, or the agent does not speak the dialect."""
    try:
        AgentFactory.get_agent_class_from_config(AgentConfig(name=player.agent))
    except ValueError:
        known = ", ".join(sorted(AgentName.values()))
        raise TaskInvalid(f"Harbor has no agent {player.agent!r}; it has {known}", param="harness") from None
    connection_to(SAMPLE_JOB.endpoint, player.agent, player.dialect)


async def fetched(name: str) -> list[Path]:
    """Downloads a data set of Harbor's registry (`name@version`) into Harbor's cache and returns its tasks' folders.

    Raises `TaskInvalid` if the registry does not have it or can't be reached.
    """
    dataset, _, version = name.partition("@")
    try:
        configs = await DatasetConfig(name=dataset, version=version or None).get_task_configs()
        downloads = await TaskClient().download_tasks(task_ids=[config.get_task_id() for config in configs])
    except Exception as error:  # a boundary: Harbor's registry and the network raise many types
        reason = str(error) or type(error).__name__
        raise TaskInvalid(f"{name} is not a folder, and Harbor's registry does not give it: {reason}") from error
    return [result.path for result in downloads.results]


async def work_on(target: str, player: Player, grader: Grader, *, runtime: str, jobs: Path) -> list[TrialWork]:
    """The work for `target`: a task's folder, a folder of task folders, or a data set of Harbor's registry.

    Raises `TaskInvalid` or `RuntimeFailed` if a trial of it could not run.
    """
    check_player(player)
    environment = environment_of(runtime, player.agent)
    folders = await in_thread(task_folders, Path(target)) or await fetched(target)
    return [_work_of(folder.resolve(), player, grader, environment, jobs) for folder in folders]


def _work_of(folder: Path, player: Player, grader: Grader, environment: EnvironmentConfig, jobs: Path) -> TrialWork:
    definition = HarborTask(folder)
    if definition.has_steps:
        raise TaskInvalid(f"the task of {folder} has steps; a rollout is one run of an agent", param="steps")
    if environment.import_path:
        build_steps_of(definition.paths.environment_dir, definition.config.environment)
    task = harbor_task(folder, grader.reward_key)
    spec = parse_spec(task.spec)
    limits = spec.limits.build()
    limits = replace(limits, agent_s=limits.agent_s + SETUP_S)
    return TrialWork(task, folder, player, grader, limits, environment, jobs, spec.rules)


class HarborRunner(AttemptRunner[TrialWork]):
    """Runs rollouts as Harbor trials."""

    async def _attempt(self, state: RolloutState[TrialWork]) -> Result:
        ours = asyncio.get_running_loop()

        async def play() -> tuple[Trial, CapturedAgent, TrialResult]:
            trial = await Trial.create(state.assignment.trial())
            agent = trial.agent
            if not isinstance(agent, CapturedAgent):
                raise RuntimeFailed(f"Harbor made {type(agent).__name__} of the agent")
            agent.serve(self.client.url, self.client.key, lambda: on_loop(ours, lambda: self._open(state)))
            return trial, agent, await trial.run()

        async with self._stage(state, Stage.RUN):
            trial, agent, result = await in_own_loop(play)  # Harbor reads the agent's logs in its event loop
        state.seen.add("trial", str(trial.paths.trial_dir))
        file = trial.paths.trial_dir / JUDGEMENT
        judgement = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if not agent.answered and not result.exception_info:
            return Result(RolloutStatus.FAILED, NOTHING_SAMPLED, cause=Cause.AGENT)
        ended = outcome(result, state.assignment.evaluator, judgement, capped=agent.capped)
        state.tampering = list(ended.verdict.tampering) if ended.verdict else []
        return ended


def outcome(result: TrialResult, grader: Grader, judgement: Mapping[str, Any], *, capped: bool = False) -> Result:
    """Converts a trial's result to the result of an attempt. `judgement` as in `Grader.verdict`.

    `capped` says that the session refused calls because of its turn cap. If such a trial has a reward, it succeeded,
    whatever error its agent ended with.
    """
    error = result.exception_info.exception_type if result.exception_info else ""
    reason = ""
    if result.exception_info:  # the end of the last line that has content
        message = result.exception_info.exception_message
        lines = "\n".join(line[-300:] for line in message.splitlines() if line.strip() != "stderr: None")
        reason = f"{error}: {last_line(lines)}"
    if error == Unreadable.__name__:
        act = TamperingAct.at(TamperingKind.UNREADABLE, reason)
        return Result(RolloutStatus.SUCCEEDED, "", Verdict((Score(0.0),), {"unreadable": reason}, tampering=(act,)))
    try:
        verdict = grader.verdict(result, judgement)
    except EvaluatorFailed as failure:
        return Result.by(failure)
    if error in OF_VERIFIER or (not error and verdict is None):
        return Result.by(NoReward(reason or "the trial has no reward"))
    if not error or (capped and verdict is not None):
        return Result(RolloutStatus.SUCCEEDED, reason, verdict)
    if error == TIMED_OUT:
        return Result(RolloutStatus.TIMED_OUT, reason, verdict, Cause.AGENT)
    if error in OF_AGENT:
        return Result(RolloutStatus.FAILED, reason, verdict, Cause.AGENT)
    has_run = result.agent_execution is not None and result.agent_execution.finished_at is not None
    if has_run and error not in {away.__name__ for away in AWAY}:
        return Result.by(NoReward(reason))
    return Result(RolloutStatus.FAILED, reason, cause=Cause.INFRASTRUCTURE)
