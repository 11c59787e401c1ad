"""Gemini CLI (npm): Gemini generateContent, streaming and not."""

from __future__ import annotations

import json

from rolltap.harnesses.base import Command, Ending, Job, Package

TURN_LIMIT = 53
"""Its exit code at the turn cap."""


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
        settings = {
            "security": {"auth": {"selectedType": "gemini-api-key"}},  # without it: exit code 41
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
            "model": {"maxSessionTurns": job.limits.turns or -1},
        }
        argv = ["gemini", "--yolo", "--skip-trust", "-m", job.endpoint.model]  # -m: no classifier call
        if job.resume:
            argv += ["--resume", "latest"]
        return Command(
            (*argv, "-p", job.instruction),
            env={"GOOGLE_GEMINI_BASE_URL": job.endpoint.base_url, "GEMINI_API_KEY": job.endpoint.key},
            files={".gemini/settings.json": json.dumps(settings)},
            endings={TURN_LIMIT: Ending.LIMIT},
        )
