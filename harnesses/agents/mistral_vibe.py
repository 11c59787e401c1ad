"""Mistral Vibe (PyPI, Python 3.12): Chat Completions, streaming."""

from __future__ import annotations

from rolltap.harnesses.base import Command, Job, Package, refuse_resume

CONFIG = """\
active_model = "rolltap"
enable_telemetry = false
enable_update_checks = false
enable_auto_update = false

[[providers]]
name = "rolltap"
api_base = "{base}"
api_key_env_var = "ROLLTAP_KEY"
api_style = "openai"
backend = "generic"

[[models]]
name = "{model}"
provider = "rolltap"
alias = "rolltap"
"""


class MistralVibe:
    name = "mistral-vibe"
    package = Package("pip", "mistral-vibe", "3.0.2", executable="vibe", python=(3, 12))
    dialect = "openai_chat"
    quirks = ("It hangs up at [DONE], which is not an abort.",)

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        argv = ["vibe", "--auto-approve", "-p", job.instruction]
        if job.limits.turns:
            argv += ["--max-turns", str(job.limits.turns)]
        endpoint = job.endpoint
        config = CONFIG.format(base=endpoint.v1, model=endpoint.model)
        if endpoint.context:
            config += f"auto_compact_threshold = {endpoint.context - endpoint.reserve}\n"
        return Command(
            tuple(argv),
            env={"ROLLTAP_KEY": job.endpoint.key, "VIBE_HOME": str(job.home / ".vibe")},
            files={".vibe/config.toml": config},
        )
