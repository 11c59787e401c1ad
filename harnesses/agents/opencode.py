"""OpenCode (npm): all four protocols through the AI SDK, streaming."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from rolltap.harnesses.base import Command, Job, Package, choice

PACKAGE = Package("npm", "opencode-ai", "1.18.33", executable="opencode")
PROVIDERS = {
    "openai_chat": ("@ai-sdk/openai-compatible", "/v1"),
    "openai_responses": ("@ai-sdk/openai", "/v1"),
    "anthropic": ("@ai-sdk/anthropic", "/v1"),
    "gemini": ("@ai-sdk/google", "/v1beta"),
}
"""Dialect → the bundled AI SDK provider, and the suffix of its base URL."""

TITLE = "rollout"
"""A title set at launch, so that no call is made to create one."""


@dataclass(frozen=True, slots=True)
class OpenCode:
    dialect: str = "openai_chat"
    name: str = "opencode"
    package: Package = PACKAGE
    quirks: tuple[str, ...] = (
        "It wraps the prompt in literal quotes.",
        "Calls of unknown tools, or with invalid arguments, come back as a tool `invalid`: a history_edited break.",
        "A clean end of the stream without its terminal event passes for a final answer.",
        "Unknown event types on the Anthropic protocol end the run.",
        "Subagents carry x-parent-session-id and may arrive while their parent still streams.",
    )

    def __post_init__(self) -> None:
        choice("dialect of opencode", self.dialect, PROVIDERS)

    def launch(self, job: Job) -> Command:
        package, suffix = PROVIDERS[self.dialect]
        model = f"rolltap/{job.endpoint.model}"
        options = {"baseURL": job.endpoint.base_url + suffix, "apiKey": job.endpoint.key}
        context = job.endpoint.context
        settings = {"limit": {"context": context, "output": job.endpoint.reserve}} if context else {}
        config = {
            "provider": {"rolltap": {"npm": package, "options": options, "models": {job.endpoint.model: settings}}},
            "model": model,
            "small_model": model,
            "permission": "allow",
            "autoupdate": False,
            "share": "disabled",
        }
        argv = ["opencode", "run", *(["--continue"] if job.resume else ["--title", TITLE])]
        return Command(
            (*argv, job.instruction),
            env={
                "OPENCODE_CONFIG_CONTENT": json.dumps(config),
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            },
        )

    def converse(self, job: Job) -> Command:
        return replace(self.launch(job), argv=("opencode",), terminal=True)
