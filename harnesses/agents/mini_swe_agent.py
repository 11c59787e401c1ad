"""mini-swe-agent (PyPI): bash as its only tool, Chat Completions through LiteLLM, no streaming.

Two kinds. `MiniSweAgent` runs the release's `mini` command as a process. `MiniSweAgentInProcess` calls the same
release's public Python API in a thread. This saves each run the seconds of importing LiteLLM, so that a small machine
can run dozens of rollouts at once.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from rolltap.errors import ConfigError
from rolltap.extras import install_line
from rolltap.harnesses.agents.resumed_mini import ResumedMini
from rolltap.harnesses.base import Command, Ending, Job, Package, PythonCall, choice

PACKAGE = Package("pip", "mini-swe-agent", "2.4.6", executable="mini", also=("litellm==1.106.2", "mcp>=1"))
QUIRKS = (
    "An assistant message whose tool call can't be parsed is left out of its history: a history_edited break.",
    "One logical call is up to three identical requests: LiteLLM's client retries before the agent's own back-off.",
)
ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else LiteLLM asks the internet for prices at import
    "MSWEA_CONFIGURED": "true",  # else the first-run wizard asks questions
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
}
ENDINGS = {
    "Submitted": Ending.DONE,
    "LimitsExceeded": Ending.LIMIT,
    "RepeatedFormatError": Ending.LIMIT,
    "TimeExceeded": Ending.TIMED_OUT,
}
"""mini-swe-agent's exit statuses. Any other status is the name of the exception that ended the run."""

AGENT_DEFAULTS: Mapping[str, Any] = {
    "system_template": "You solve tasks with bash. Every reply calls the bash tool.",
    "instance_template": (
        "{{task}}\nWhen it is done, run as a command of its own: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    ),
    "cost_limit": 0.0,
}

MODELS = {
    "litellm": ("minisweagent.models.litellm_model", "LitellmModel"),
    "litellm_textbased": ("minisweagent.models.litellm_textbased_model", "LitellmTextbasedModel"),
}

TRAJECTORY = ".config/mini-swe-agent/last_mini_run.traj.json"
"""Below HOME. The release writes it after each step."""

RESUMED_AGENT = """

from minisweagent.agents.interactive import InteractiveAgent


class ResumedAgent(ResumedMini, InteractiveAgent):
    message = {message!r}
"""

CALL_TIMEOUT_S = 600.0
ATTEMPTS = 3
"""Tries of one model call. Few are enough, as the proxy itself retries its engine."""


class MiniSweAgent:
    name = "mini-swe-agent"
    package = PACKAGE
    dialect = "openai_chat"
    quirks = QUIRKS

    def launch(self, job: Job) -> Command:
        return self._resumed(job, job.instruction) if job.resume else self._launch(job)

    def go_on(self, job: Job) -> Command:
        return self._resumed(job, "")

    def _resumed(self, job: Job, message: str) -> Command:
        launch = self._launch(job)
        module = files("rolltap.harnesses.agents").joinpath("resumed_mini.py").read_text(encoding="utf-8")
        return replace(
            launch,
            argv=(*launch.argv, "--agent-class", "rolltap_mini.ResumedAgent", "-o", str(job.home / TRAJECTORY)),
            env={**launch.env, "PYTHONPATH": str(job.home / ".rolltap")},
            files={".rolltap/rolltap_mini.py": f"{module}{RESUMED_AGENT.format(message=message)}"},
        )

    def _launch(self, job: Job) -> Command:
        argv = ["mini", "-m", f"openai/{job.endpoint.model}", "-y", "--exit-immediately", "-t", job.instruction]
        if job.limits.turns:
            argv += ["-c", "mini.yaml", "-c", f"agent.step_limit={job.limits.turns}"]
        return Command(
            argv=tuple(argv),
            env={
                **ENVIRONMENT,
                "OPENAI_API_KEY": job.endpoint.key,
                "OPENAI_API_BASE": job.endpoint.v1,
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": str(ATTEMPTS),
            },
        )

    def converse(self, job: Job) -> Command:
        """It asks for the task, and before each command."""
        return replace(self._launch(job), argv=("mini", "-m", f"openai/{job.endpoint.model}"), terminal=True)


@dataclass(frozen=True, slots=True)
class MiniSweAgentInProcess:
    """`config` has keyword arguments for the release's own classes, by part: `agent`, `model`, `environment`.
    `model_class` of `model` is one of `MODELS`, by the release's own names: with "litellm_textbased" commands are
    blocks of text, for models that know no tools. The default templates are two short ones.

    Its bash commands run as this process's children in the rollout's folder, with the rollout's HOME.
    """

    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name: str = "mini-swe-agent-inprocess"
    package: Package = PACKAGE
    dialect: str = "openai_chat"
    quirks: tuple[str, ...] = QUIRKS

    def __post_init__(self) -> None:
        choice("dialect of mini-swe-agent-inprocess", self.dialect, {"openai_chat": None})

    def launch(self, job: Job) -> PythonCall:
        return PythonCall(partial(_run, job, self.config, job.instruction if job.resume else None))

    def go_on(self, job: Job) -> PythonCall:
        return PythonCall(partial(_run, job, self.config, ""))


def _run(
    job: Job, config: Mapping[str, Mapping[str, Any]], message: str | None, stop: threading.Event
) -> tuple[Ending, str]:
    """`message`: the next one of a resumed run, "" for none; None begins anew."""
    agent = _make_agent(job, config, message, stop)
    try:
        result = agent.run(job.instruction)
    except Exception as error:  # noqa: BLE001  foreign code: any exception is an ending of the run
        return (Ending.CANCELLED if stop.is_set() else Ending.CRASHED), f"{type(error).__name__}: {error}"
    status = str(result.get("exit_status", ""))
    return ENDINGS.get(status, Ending.CRASHED), status


def _make_agent(job: Job, config: Mapping[str, Mapping[str, Any]], message: str | None, stop: threading.Event) -> Any:
    quiet_environment()
    try:
        import litellm
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.exceptions import TimeExceeded
    except ImportError as error:
        raise ConfigError(f"mini-swe-agent is not installed ({error}); {install_line('demo')}") from error

    litellm.suppress_debug_info = True  # else it prints advice with every failed call

    class StoppableEnvironment(LocalEnvironment):
        """The release's local bash, which refuses further commands when the rollout must end."""

        def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
            if stop.is_set():
                raise TimeExceeded({"role": "exit", "content": "", "extra": {"exit_status": "TimeExceeded"}})
            return super().execute(action, cwd, timeout=timeout)

    model_options = dict(config.get("model", {}))
    module, name = choice("model.model_class", model_options.pop("model_class", "litellm"), MODELS)
    call_options = {
        "timeout": CALL_TIMEOUT_S,
        "max_retries": 0,
        **model_options.pop("model_kwargs", {}),
        "api_base": job.endpoint.v1,
        "api_key": job.endpoint.key,
    }
    model = getattr(import_module(module), name)(
        model_name=f"openai/{job.endpoint.model}", model_kwargs=call_options, **model_options
    )
    environment_options = dict(config.get("environment", {}))
    prefixes = ("ROLLTAP_", "OPENAI_", "ANTHROPIC_", "GEMINI_", "AWS_", "HF_")  # the runner's own settings and keys
    emptied = {name: "" for name in os.environ if name.startswith(prefixes)}
    environment_options["env"] = {**emptied, **environment_options.get("env", {}), "HOME": str(job.home)}
    environment = StoppableEnvironment(cwd=str(job.workdir), **environment_options)
    agent_options = {
        **AGENT_DEFAULTS,
        "wall_time_limit_seconds": int(job.limits.agent_s),
        "output_path": job.home / TRAJECTORY,
        **config.get("agent", {}),
    }
    if job.limits.turns:
        agent_options["step_limit"] = job.limits.turns
    if message is None:
        return DefaultAgent(model, environment, **agent_options)
    resumed = type("ResumedAgent", (ResumedMini, DefaultAgent), {"message": message})
    return resumed(model, environment, **agent_options)


def quiet_environment() -> None:
    """Sets the environment variables that mini-swe-agent and LiteLLM read when they are imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", str(ATTEMPTS))
    os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(Path(tempfile.gettempdir()) / "rolltap-mini-swe-agent"))
