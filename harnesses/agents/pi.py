"""Pi (npm, @earendil-works): all four protocols, streaming."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from rolltap.harnesses.base import Command, Job, Package, choice

PACKAGE = Package("npm", "@earendil-works/pi-coding-agent", "1.6.0", executable="pi", node=22)
APIS = {
    "openai_chat": ("openai-completions", "/v1"),
    "openai_responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "gemini": ("google-generative-ai", "/v1beta"),
}
"""Dialect → Pi's name of the protocol, and the suffix of its client's base URL."""

FOLDER = ".pi/agent"
CONTEXT_TOKENS = 131_072
KEEP_RECENT_TOKENS = 20_000
"""Pi's own default: what a compaction keeps of the history, at four characters a token (numbers have one)."""


@dataclass(frozen=True, slots=True)
class Pi:
    dialect: str = "openai_chat"
    name: str = "pi"
    package: Package = PACKAGE
    quirks: tuple[str, ...] = (
        "It re-serialises tool arguments, and repairs invalid JSON and runs it.",
        "Its output limit shrinks with the usage that it is told.",
        "On the Gemini protocol it drops tool-call ids.",
        "A dropped stream is retried cleanly; a malformed chunk ends the run.",
    )

    def __post_init__(self) -> None:
        choice("dialect of pi", self.dialect, APIS)

    def launch(self, job: Job) -> Command:
        api, suffix = APIS[self.dialect]
        endpoint = replace(job.endpoint, context=job.endpoint.context or CONTEXT_TOKENS)
        model = {"id": endpoint.model, "contextWindow": endpoint.context, "maxTokens": endpoint.reserve}
        keep_recent = min(KEEP_RECENT_TOKENS, endpoint.context // 8)
        compaction = {"reserveTokens": endpoint.reserve, "keepRecentTokens": keep_recent}
        provider = {
            "baseUrl": job.endpoint.base_url + suffix,
            "api": api,
            "apiKey": "$ROLLTAP_KEY",
            "models": [model],
        }
        argv = ["pi", "--provider", "rolltap", "--model", job.endpoint.model]
        if job.resume:
            argv.append("-c")
        return Command(
            (*argv, "-p", job.instruction),
            env={"ROLLTAP_KEY": job.endpoint.key, "PI_OFFLINE": "1", "PI_CODING_AGENT_DIR": str(job.home / FOLDER)},
            files={
                f"{FOLDER}/models.json": json.dumps({"providers": {"rolltap": provider}}),
                f"{FOLDER}/settings.json": json.dumps({"compaction": compaction}),
            },
        )

    def converse(self, job: Job) -> Command:
        launch = self.launch(job)
        return replace(launch, argv=launch.argv[:-2], terminal=True)  # without `-p PROMPT`
