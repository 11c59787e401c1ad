"""The harnesses that a task or a person can name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any, cast

from rolltap.errors import TaskInvalid
from rolltap.extras import known_names, lookup
from rolltap.harnesses.aider import Aider
from rolltap.harnesses.base import Harness
from rolltap.harnesses.claude_agent_sdk import ClaudeAgentSdk
from rolltap.harnesses.claude_code import ClaudeCode
from rolltap.harnesses.cline import Cline
from rolltap.harnesses.codex import Codex
from rolltap.harnesses.command import AnyCommand
from rolltap.harnesses.copilot_cli import CopilotCli
from rolltap.harnesses.gemini_cli import GeminiCli
from rolltap.harnesses.gptme import Gptme
from rolltap.harnesses.hermes import Hermes
from rolltap.harnesses.mini_swe_agent import MiniSweAgent, MiniSweAgentInProcess
from rolltap.harnesses.mistral_vibe import MistralVibe
from rolltap.harnesses.openai_agents import OpenAIAgents
from rolltap.harnesses.opencode import OpenCode
from rolltap.harnesses.openhands import OpenHands
from rolltap.harnesses.pi import Pi
from rolltap.harnesses.qwen_agent import QwenAgent
from rolltap.harnesses.qwen_code import QwenCode
from rolltap.harnesses.smolagents import SmolAgents

HARNESSES: Mapping[str, Harness] = {
    "codex": Codex(),
    "claude-code": ClaudeCode(),
    "pi": Pi(),
    "qwen-code": QwenCode(),
    "gemini-cli": GeminiCli(),
    "opencode": OpenCode(),
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
