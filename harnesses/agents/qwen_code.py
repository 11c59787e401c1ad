"""Qwen Code (npm): Chat Completions, Responses or Anthropic Messages, streaming."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rolltap.harnesses.base import Command, Ending, Job, Package, choice

PACKAGE = Package("npm", "@qwen-code/qwen-code", "0.24.4", executable="qwen")
AUTH_TYPES = {"openai_chat": "openai", "openai_responses": "openai-responses", "anthropic": "anthropic"}
TURN_LIMIT = 53
"""Its exit code at the turn cap."""


@dataclass(frozen=True, slots=True)
class QwenCode:
    dialect: str = "openai_chat"
    name: str = "qwen-code"
    package: Package = PACKAGE
    quirks: tuple[str, ...] = (
        "It re-serialises tool arguments and trims the reasoning that it sends back.",
        "After a dropped stream it splices both generations into one message.",
        "A resumed run rewrites its environment message (date, git status, tree): a history_edited break.",
        "Subagents are unmarked. Its terminal lost a fast command's output in 2 of 27 runs.",
        "On Node.js 24 it takes 1.9 GB of memory, on 20 a seventh of that.",
    )

    def __post_init__(self) -> None:
        choice("dialect of qwen-code", self.dialect, AUTH_TYPES)

    def launch(self, job: Job) -> Command:
        endpoint, auth = job.endpoint, AUTH_TYPES[self.dialect]
        prefix, base = ("ANTHROPIC", endpoint.base_url) if auth == "anthropic" else ("OPENAI", endpoint.v1)
        settings: dict[str, dict[str, Any]] = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False},
            "security": {"auth": {"selectedType": auth}},
        }
        if endpoint.context:
            settings["model"] = {"generationConfig": {"contextWindowSize": endpoint.context}}
        argv = ["qwen", "--yolo", "--auth-type", auth]
        if job.limits.turns:
            argv += ["--max-session-turns", str(job.limits.turns)]
        if job.resume:
            argv.append("--continue")
        return Command(
            (*argv, "-p", job.instruction),
            env={
                f"{prefix}_BASE_URL": base,
                f"{prefix}_API_KEY": endpoint.key,
                f"{prefix}_MODEL": endpoint.model,
                "QWEN_SANDBOX": "false",
                "QWEN_HOME": str(job.home / ".qwen"),
            },
            files={".qwen/settings.json": json.dumps(settings)},
            endings={TURN_LIMIT: Ending.LIMIT},
        )

    def converse(self, job: Job) -> Command:
        launch = self.launch(job)
        return replace(launch, argv=launch.argv[:-2], terminal=True)  # without `-p PROMPT`
