"""The harnesses that a task or a person can name, and their releases that ran in the stage of real harnesses.

`scripts/harnesses_page.py` makes `tested.json` from the stage's report: harness → release → run → result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, cast

from rolltap.errors import TaskInvalid
from rolltap.extras import known_names, lookup
from rolltap.harnesses.agents.aider import Aider
from rolltap.harnesses.agents.claude_agent_sdk import ClaudeAgentSdk
from rolltap.harnesses.agents.claude_code import ClaudeCode
from rolltap.harnesses.agents.cline import Cline
from rolltap.harnesses.agents.codex import Codex
from rolltap.harnesses.agents.command import AnyCommand
from rolltap.harnesses.agents.copilot_cli import CopilotCli
from rolltap.harnesses.agents.gemini_cli import GeminiCli
from rolltap.harnesses.agents.gptme import Gptme
from rolltap.harnesses.agents.hermes import Hermes
from rolltap.harnesses.agents.mini_swe_agent import MiniSweAgent, MiniSweAgentInProcess
from rolltap.harnesses.agents.mistral_vibe import MistralVibe
from rolltap.harnesses.agents.openai_agents import OpenAIAgents
from rolltap.harnesses.agents.openclaw import OpenClaw
from rolltap.harnesses.agents.opencode import OpenCode
from rolltap.harnesses.agents.openhands import OpenHands
from rolltap.harnesses.agents.pi import Pi
from rolltap.harnesses.agents.qwen_agent import QwenAgent
from rolltap.harnesses.agents.qwen_code import QwenCode
from rolltap.harnesses.agents.smolagents import SmolAgents
from rolltap.harnesses.base import Harness

HARNESSES: Mapping[str, Harness] = {
    "codex": Codex(),
    "claude-code": ClaudeCode(),
    "pi": Pi(),
    "qwen-code": QwenCode(),
    "gemini-cli": GeminiCli(),
    "opencode": OpenCode(),
    "openclaw": OpenClaw(),
    "copilot-cli": CopilotCli(),
    "cline": Cline(),
    "mini-swe-agent": MiniSweAgent(),
    "mini-swe-agent-inprocess": MiniSweAgentInProcess(),
    "openhands": OpenHands(),
    "openai-agents": OpenAIAgents(),
    "claude-agent-sdk": ClaudeAgentSdk(),
    "smolagents": SmolAgents(),
    "aider": Aider(),
    "mistral-vibe": MistralVibe(),
    "hermes": Hermes(),
    "qwen-agent": QwenAgent(),
    "gptme": Gptme(),
}


ENTRY_POINTS = "rolltap.harnesses"


def harness_names() -> list[str]:
    """The built-in names in the registry's order, then those of installed packages; without `command`."""
    return [*HARNESSES, *(name for name in known_names({}, ENTRY_POINTS) if name not in HARNESSES)]


def get_harness(name: str, *, dialect: str = "", argv: tuple[str, ...] = ()) -> Harness:
    """The harness `name`; for `command`, one that runs `argv`.

    `dialect` is for harnesses with several. Raises `TaskInvalid`, with the known names, if one is unknown.
    """
    if name == "command":
        if not argv:
            raise TaskInvalid("the harness 'command' needs the command to run", param="harness")
        return AnyCommand(argv)
    harness = lookup("harness", name, HARNESSES, ENTRY_POINTS, TaskInvalid)
    if not dialect or dialect == harness.dialect:
        return harness
    if not is_dataclass(harness):
        raise TaskInvalid(f"{name} speaks {harness.dialect} only", param="dialect")
    return cast(Harness, replace(cast(Any, harness), dialect=dialect))


TABLE = "tested.json"


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """A release and its runs in the stage: the day of the last one, their number, and the number as expected."""

    release: str
    day: str
    runs: int
    passed: int

    @property
    def result(self) -> str:
        return f"{self.passed} of {self.runs}"


@cache
def stage_results() -> Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]:
    """Harness → release → run (protocol and scenario) → its result."""
    return json.loads((files("rolltap.harnesses") / TABLE).read_text(encoding="utf-8"))


def release_results(harness: str) -> list[ReleaseResult]:
    """The releases of `harness` that ran, newest first; empty if it is not a built-in harness."""
    releases = [
        ReleaseResult(
            release, max(run["day"] for run in runs.values()), len(runs), sum(one["passed"] for one in runs.values())
        )
        for release, runs in stage_results().get(harness, {}).items()
    ]
    return sorted(
        releases,
        key=lambda result: [int(part) for part in result.release.split(".") if part.isdigit()],
        reverse=True,
    )
