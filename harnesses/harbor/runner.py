"""Groups of Harbor's trials: a trial is an attempt of a rollout, and its reward is what Harbor's verifier said.

How a trial ended is Harbor's word: the agent's own failures are graded, the verifier's leave the rollout without a
reward, and everything else (a sandbox, an installation, a model's server) is a failure of the infrastructure, after
which the ledger has the rollout tried again.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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

from rolltap.errors import EvaluatorFailed, RuntimeFailed, TaskInvalid
from rolltap.harnesses.attempts import AttemptRunner, RolloutState, Stage
from rolltap.harnesses.base import Limits, Score, Verdict
from rolltap.harnesses.evaluators.harbor import chosen_reward
from rolltap.harnesses.harbor.agent import CapturedAgent
from rolltap.harnesses.harbor.environment import SANDBOX, BubblewrapEnvironment, recipe_of
from rolltap.harnesses.harbor.names import connection_to
from rolltap.harnesses.output import last_line
from rolltap.harnesses.result import Result
from rolltap.harnesses.specs import SAMPLE_JOB, parse_spec
from rolltap.harnesses.tasks import harbor_task, task_folders
from rolltap.types import Cause, RolloutStatus, Task

SETUP_S = 360.0
"""What Harbor gives the installation of an agent, for which its key lives too."""

litellm.suppress_debug_info = True  # it prints where it looks up the maker of a model
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
"""Harbor's classes of errors, by the names that its results have."""


@dataclass(frozen=True, slots=True)
class Player:
    """Harbor's agent, in the seat of a harness: `harbor/NAME` in the record."""

    agent: str
    dialect: str = ""

    @property
    def name(self) -> str:
        return f"harbor/{self.agent}"


@dataclass(frozen=True, slots=True)
class Grader:
    """Harbor's verifier; `reward_key` names the reward that counts where it gives several and none is `reward`."""

    reward_key: str = ""
    name: str = "harbor"

    def verdict(self, result: TrialResult) -> Verdict | None:
        rewards = result.verifier_result.rewards if result.verifier_result else None
        if not rewards:
            return None
        values = {name: float(value) for name, value in rewards.items()}
        return Verdict((Score(chosen_reward(values, self.reward_key)),), {"parts": values, "trial": result.trial_name})


@dataclass(frozen=True, slots=True)
class TrialWork:
    """What the trials of the task in `folder` are made of. Their own folders are below `jobs`."""

    task: Task
    folder: Path
    harness: Player
    evaluator: Grader
    limits: Limits
    environment: EnvironmentConfig
    jobs: Path

    def trial(self) -> TrialConfig:
        path = f"{CapturedAgent.__module__}:{CapturedAgent.__name__}"
        agent = AgentConfig(import_path=path, kwargs=asdict(self.harness))
        task = TaskConfig(path=self.folder)
        return TrialConfig(task=task, trials_dir=self.jobs, agent=agent, environment=self.environment)


def environment_of(runtime: str, agent: str) -> EnvironmentConfig:
    """Our sandbox for `auto` and `bubblewrap`, else Harbor's own environment of that name.

    `RuntimeFailed` says what this machine lacks for the sandbox.
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
    """`TaskInvalid` for an agent that Harbor does not have, or a dialect that it does not speak."""
    try:
        AgentFactory.get_agent_class_from_config(AgentConfig(name=player.agent))
    except ValueError:
        known = ", ".join(sorted(AgentName.values()))
        raise TaskInvalid(f"Harbor has no agent {player.agent!r}; it has {known}", param="harness") from None
    connection_to(SAMPLE_JOB.endpoint, player.agent, player.dialect)


async def fetched(name: str) -> list[Path]:
    """The folders of the tasks of a data set in Harbor's registry (`name@version`), downloaded into Harbor's cache."""
    dataset, _, version = name.partition("@")
    try:
        configs = await DatasetConfig(name=dataset, version=version or None).get_task_configs()
        downloads = await TaskClient().download_tasks(task_ids=[config.get_task_id() for config in configs])
    except Exception as error:  # the boundary to Harbor's registry and the network
        reason = str(error) or type(error).__name__
        raise TaskInvalid(f"{name} is no folder, and Harbor's registry does not give it: {reason}") from error
    return [result.path for result in downloads.results]


async def work_on(target: str, player: Player, grader: Grader, *, runtime: str, jobs: Path) -> list[TrialWork]:
    """The work of a task's folder, of a folder of such, or of a data set of Harbor's registry."""
    check_player(player)
    environment = environment_of(runtime, player.agent)
    folders = await asyncio.to_thread(task_folders, Path(target)) or await fetched(target)
    return [_work_of(folder.resolve(), player, grader, environment, jobs) for folder in folders]


def _work_of(folder: Path, player: Player, grader: Grader, environment: EnvironmentConfig, jobs: Path) -> TrialWork:
    asked = HarborTask(folder)
    if asked.has_steps:
        raise TaskInvalid(f"the task of {folder} has steps; a rollout is one run of an agent", param="steps")
    if environment.import_path:
        recipe_of(asked.paths.environment_dir, asked.config.environment)
    task = harbor_task(folder, grader.reward_key)
    limits = parse_spec(task.spec).limits.build()
    limits = replace(limits, agent_s=limits.agent_s + SETUP_S)
    return TrialWork(task, folder, player, grader, limits, environment, jobs)


class HarborRunner(AttemptRunner[TrialWork]):
    """Runs rollouts as trials of Harbor's."""

    async def _attempt(self, state: RolloutState[TrialWork]) -> Result:
        async with self._stage(state, Stage.RUN):
            trial = await Trial.create(state.assignment.trial())
            agent = trial.agent
            if not isinstance(agent, CapturedAgent):
                raise RuntimeFailed(f"Harbor made {type(agent).__name__} of the agent")
            agent.serve(self._client, lambda: self._open(state))
            result = await trial.run()
        state.seen.add("trial", str(trial.paths.trial_dir))
        return outcome(result, state.assignment.evaluator, capped=agent.capped)


def outcome(result: TrialResult, grader: Grader, *, capped: bool = False) -> Result:
    """What a trial's result is to the ledger. `capped`: its session had reached its cap of turns."""
    error = result.exception_info.exception_type if result.exception_info else ""
    reason = f"{error}: {_told(result)}" if error else ""
    try:
        verdict = grader.verdict(result)
    except EvaluatorFailed as failure:
        return Result.by(failure)
    if error in OF_VERIFIER or (not error and verdict is None):
        return Result.by(EvaluatorFailed(reason or "the trial has no reward"))
    if not error or (capped and verdict is not None):
        return Result(RolloutStatus.SUCCEEDED, reason, verdict)
    if error == TIMED_OUT:
        return Result(RolloutStatus.TIMED_OUT, reason, verdict, Cause.AGENT)
    if error in OF_AGENT:
        return Result(RolloutStatus.FAILED, reason, verdict, Cause.AGENT)
    return Result(RolloutStatus.FAILED, reason, cause=Cause.INFRASTRUCTURE)


def _told(result: TrialResult) -> str:
    """What of Harbor's message a reason quotes: the end of the last line that says something."""
    lines = [line for line in result.exception_info.exception_message.splitlines() if line.strip() != "stderr: None"]
    return last_line("\n".join(line[-300:] for line in lines))
