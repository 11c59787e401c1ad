"""Claude Agent SDK (PyPI): Anthropic Messages through the Claude Code it contains."""

from __future__ import annotations

from rolltap.harnesses.agents.claude_code import ClaudeCode, claude_environment
from rolltap.harnesses.agents.libraries import driver
from rolltap.harnesses.base import Command, Job, Package


class ClaudeAgentSdk:
    name = "claude-agent-sdk"
    package = Package("pip", "claude-agent-sdk", "0.2.189", executable="python")
    dialect = "anthropic"
    quirks = ("A title is asked for in a side call.", *ClaudeCode.quirks)

    def launch(self, job: Job) -> Command:
        env = {**claude_environment(job.endpoint), "ROLLTAP_RESUME": str(int(job.resume))}
        return driver("claude_agent", job, env)
