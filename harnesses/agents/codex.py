"""Codex CLI (npm): OpenAI Responses, streaming."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

from rolltap.harnesses.base import Command, Endpoint, Job, Package

CATALOGUE = ".codex/rolltap-models.json"
"""The catalogue of models that it reads, with the policy as the only one."""

INSTRUCTIONS = "codex_prompt.md.txt"
"""Its instructions for a model that it does not know (Apache-2.0; the same in releases 0.165 to 0.171). An entry of a
catalogue must have some."""

CONTEXT_TOKENS = 272_000
TOOL_OUTPUT_BYTES = 10_000


class Codex:
    name = "codex"
    package = Package("npm", "@openai/codex", "0.171.0", executable="codex")
    dialect = "openai_responses"
    quirks = (
        "The model's name decides the request's shape: an unknown name gives plain function tools, names of its vendor "
        "move tools into the input and add freeform ones.",
        "Completed items of a dropped stream stay in its history, one more copy for each retry.",
        "Comments in the stream do not reset its idle timer of 300 s; real events do.",
        "A 429 without Retry-After ends the run at once.",
        "With its built-in provider (`openai_base_url`) it asks for a WebSocket first; 426 sends it to HTTP at once.",
    )

    def launch(self, job: Job) -> Command:
        provider: dict[str, str | bool] = {
            "name": "rolltap",
            "base_url": job.endpoint.v1,
            "wire_api": "responses",
            "env_key": "ROLLTAP_KEY",
            "supports_websockets": False,
        }
        settings: dict[str, str | bool | int] = {
            "model_provider": "rolltap",
            "check_for_update_on_startup": False,
            "analytics.enabled": False,
            "model_catalog_json": str(job.home / CATALOGUE),
            **{f"model_providers.rolltap.{key}": value for key, value in provider.items()},
        }
        if context := job.endpoint.context:
            settings["model_context_window"] = context
            settings["model_auto_compact_token_limit"] = context - job.endpoint.reserve
        argv = ["codex", "exec", *(["resume", "--last"] if job.resume else [])]
        argv += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", job.endpoint.model]
        for key, value in settings.items():
            argv += ["-c", f"{key}={json.dumps(value)}"]  # JSON strings and booleans are TOML ones
        argv += ["--disable", "plugins", "--disable", "apps", job.instruction]
        catalogue = {"models": [_model(job.endpoint)]}
        return Command(tuple(argv), env={"ROLLTAP_KEY": job.endpoint.key}, files={CATALOGUE: json.dumps(catalogue)})

    def converse(self, job: Job) -> Command:
        launch = self.launch(job)
        argv = [word for word in launch.argv[:-1] if word not in ("exec", "--skip-git-repo-check")]
        folder = json.dumps(str(job.workdir))
        argv += ["-c", f'projects={{{folder}={{trust_level="trusted"}}}}']  # else it asks first
        return replace(launch, argv=tuple(argv), terminal=True)


def _model(endpoint: Endpoint) -> dict[str, Any]:
    """The catalogue's entry of the model. Its values are those that Codex assumes of a model that it does not know,
    after a warning, but for shorter outputs of tools in a small context."""
    context = endpoint.context or CONTEXT_TOKENS
    return {
        "slug": endpoint.model,
        "display_name": endpoint.model,
        "base_instructions": files("rolltap.harnesses.agents.drivers")
        .joinpath(INSTRUCTIONS)
        .read_text(encoding="utf-8"),
        "shell_type": "unified_exec",
        "visibility": "none",  # as the choice for a subagent
        "supported_in_api": True,
        "priority": 0,
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "experimental_supported_tools": [],
        "context_window": context,
        "truncation_policy": {"mode": "bytes", "limit": min(TOOL_OUTPUT_BYTES, context // 4)},
    }
