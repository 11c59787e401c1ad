"""Gemini CLI (npm): Gemini generateContent, streaming and not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from rolltap.harnesses.base import Command, Ending, Job, Package

TURN_LIMIT = 53
"""Its exit code at the turn cap."""


ASSUMED_CONTEXT = 1_048_576
"""The context length in tokens that it assumes of a model that it does not know. It compacts at a share of that."""

TOOL_OUTPUT_CHARS = 40_000
"""Its own limit of a tool's output."""


class GeminiCli:
    name = "gemini-cli"
    package = Package("npm", "@google/gemini-cli", "0.61.0", executable="gemini")
    dialect = "gemini"
    quirks = (
        "Comments in the stream crash it; it must be kept alive by other means.",
        "It takes a clean end of the stream, an error in mid-stream and an empty answer for a final one: exit code 0.",
        "A dropped stream is not retried.",
        "Thought text is dropped from history, its signature kept.",
        "A resumed run trims text and triples function responses: a history_edited break.",
    )

    def launch(self, job: Job) -> Command:
        settings: dict[str, dict[str, Any]] = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},  # without it: exit code 41
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "model": {"maxSessionTurns": job.limits.turns or -1},
        }
        if context := job.endpoint.context:
            settings["model"]["compressionThreshold"] = (context - job.endpoint.reserve) / ASSUMED_CONTEXT
            settings["tools"] = {"truncateToolOutputThreshold": min(TOOL_OUTPUT_CHARS, context // 2)}
        argv = ["gemini", "--yolo", "--skip-trust", "-m", job.endpoint.model]  # -m: no classifier call
        if job.resume:
            argv += ["--resume", "latest"]
        return Command(
            (*argv, "-p", job.instruction),
            env={
                "GOOGLE_GEMINI_BASE_URL": job.endpoint.base_url,
                "GEMINI_API_KEY": job.endpoint.key,
                "GEMINI_CLI_HOME": str(job.home),
            },
            files={".gemini/settings.json": json.dumps(settings)},
            endings={TURN_LIMIT: Ending.LIMIT},
        )

    def converse(self, job: Job) -> Command:
        launch = self.launch(job)
        return replace(launch, argv=launch.argv[:-2], terminal=True)  # without `-p PROMPT`
