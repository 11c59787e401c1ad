"""Codex CLI (npm): OpenAI Responses, streaming."""

from __future__ import annotations

import json

from rolltap.harnesses.base import Command, Job, Package


class Codex:
    name = "codex"
    package = Package("npm", "@openai/codex", "0.169.0", executable="codex")
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
            **{f"model_providers.rolltap.{key}": value for key, value in provider.items()},
        }
        if job.endpoint.context:
            settings["model_context_window"] = job.endpoint.context
        argv = ["codex", "exec", *(["resume", "--last"] if job.resume else [])]
        argv += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", job.endpoint.model]
        for key, value in settings.items():
            argv += ["-c", f"{key}={json.dumps(value)}"]  # JSON strings and booleans are TOML ones
        argv += ["--disable", "plugins", "--disable", "apps", job.instruction]
        return Command(tuple(argv), env={"ROLLTAP_KEY": job.endpoint.key})
