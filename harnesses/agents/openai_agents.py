"""OpenAI Agents SDK (PyPI): Responses or Chat Completions, no streaming."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.harnesses.agents.libraries import driver, openai_environment
from rolltap.harnesses.base import Command, Job, Package, choice, refuse_resume

PACKAGE = Package("pip", "openai-agents", "0.24.0", executable="python")
APIS = {"openai_responses": "responses", "openai_chat": "chat"}


@dataclass(frozen=True, slots=True)
class OpenAIAgents:
    dialect: str = "openai_responses"
    name: str = "openai-agents"
    package: Package = PACKAGE
    quirks: tuple[str, ...] = (
        "It leaves `store` and `stream` out of its requests.",
        "On Chat Completions it drops reasoning from history.",
        "A reply that it can't use (no such tool, cut off) ends its run as the turn cap does.",
        "Tracing is switched off: it would call its vendor.",
    )

    def __post_init__(self) -> None:
        choice("dialect of openai-agents", self.dialect, APIS)

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        env = {"ROLLTAP_API": APIS[self.dialect], "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        return driver("openai_agents", job, {**openai_environment(job), **env})
