"""OpenClaw (npm): all four protocols through the core of Pi, streaming; one turn without its gateway."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from rolltap.harnesses.base import Command, Job, Package, choice, refuse_resume

PACKAGE = Package("npm", "openclaw", "2026.9.6", executable="openclaw", node=24)
APIS = {
    "openai_chat": ("openai-completions", "/v1"),
    "openai_responses": ("openai-responses", "/v1"),
    "anthropic": ("anthropic-messages", ""),
    "gemini": ("google-generative-ai", "/v1beta"),
}
"""Dialect → OpenClaw's name of the protocol, and the suffix of its client's base URL."""

FOLDER = ".openclaw"
CONTEXT_TOKENS = 131_072

REPORTED_TOOLS = ("process", "sessions_spawn", "image_generate", "music_generate", "video_generate")
"""While one of these is offered, each request ends with a message of what it is doing, which the next has not."""


@dataclass(frozen=True, slots=True)
class OpenClaw:
    dialect: str = "openai_chat"
    name: str = "openclaw"
    package: Package = PACKAGE
    quirks: tuple[str, ...] = (
        "With `process`, `sessions_spawn` or a tool that makes media, each request ends with a message of their state, "
        "which the next one moves: a history_edited break at every call. So these tools are denied.",
        "The first message begins with the minute in which it was sent.",
        "It rewrites tool-call ids.",
        "After a failed request it goes on with a user message of its own.",
    )

    def __post_init__(self) -> None:
        choice("dialect of openclaw", self.dialect, APIS)

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        api, suffix = APIS[self.dialect]
        endpoint, folder = replace(job.endpoint, context=job.endpoint.context or CONTEXT_TOKENS), job.home / FOLDER
        model = {"id": endpoint.model, "name": endpoint.model, "contextWindow": endpoint.context}
        provider = {
            "baseUrl": endpoint.base_url + suffix,
            "api": api,
            "apiKey": "${ROLLTAP_KEY}",
            "models": [{**model, "maxTokens": endpoint.reserve}],
        }
        config: dict[str, Any] = {
            "models": {
                "mode": "replace",
                "catalogRefresh": {"enabled": False},
                "providers": {"rolltap": provider},
            },
            "agents": {
                "defaults": {
                    "compaction": {"memoryFlush": {"enabled": False}, "midTurnPrecheck": {"enabled": True}},
                }
            },
            "tools": {"deny": list(REPORTED_TOOLS), "toolSearch": False},
            "skills": {"workshop": {"autonomous": {"mode": "off"}}},
            "update": {"checkOnStart": False},
            "logging": {"file": str(folder / "openclaw.log")},
        }
        argv = ["openclaw", "agent", "exec", "--state-dir", str(folder), "--model", f"rolltap/{endpoint.model}"]
        argv += ["--code-mode", "direct", "--timeout", "0"]
        return Command(
            (*argv, "--", job.instruction),
            env={
                "ROLLTAP_KEY": endpoint.key,
                "OPENCLAW_STATE_DIR": str(folder),
                "OPENCLAW_CONFIG_PATH": str(folder / "openclaw.json"),
                "OPENCLAW_NO_AUTO_UPDATE": "1",
                # Where a sandbox's /proc is read-only, a command's output would begin with the shell's complaint.
                "OPENCLAW_CHILD_OOM_SCORE_ADJ": "0",
            },
            files={f"{FOLDER}/openclaw.json": json.dumps(config)},
        )
