"""Any command, for agents without a harness definition. Environment variables point it at its session."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rolltap.harnesses.base import Command, Job

FIELD = re.compile(r"\{(?:prompt|base_url|key|model)\}")


@dataclass(frozen=True, slots=True)
class AnyCommand:
    """`argv` may contain `{prompt}`, `{base_url}`, `{key}` and `{model}`. Without `{prompt}`, stdin has the prompt.

    The usual variables of the four vendors' clients point at the session, so many agents need nothing else.
    `ROLLTAP_CONTEXT` is the model's context length in tokens, 0 if unknown. If there are several policies,
    `ROLLTAP_ROLES` has the model names of the rollout's roles, and `ROLLTAP_ROLE_CONTEXTS` their lengths.
    """

    argv: tuple[str, ...]
    name: str = "command"
    package: None = None
    dialect: str = "openai_chat"
    quirks: tuple[str, ...] = ()

    def launch(self, job: Job) -> Command:
        endpoint = job.endpoint
        values = {
            "{prompt}": job.instruction,
            "{base_url}": endpoint.base_url,
            "{key}": endpoint.key,
            "{model}": endpoint.model,
        }
        argv = tuple(FIELD.sub(lambda field: values[field.group()], part) for part in self.argv)
        prompt_in_argv = any("{prompt}" in part for part in self.argv)
        return Command(
            argv,
            env={
                "ROLLTAP_BASE_URL": endpoint.base_url,
                "ROLLTAP_KEY": endpoint.key,
                "ROLLTAP_MODEL": endpoint.model,
                "ROLLTAP_CONTEXT": str(endpoint.context),
                "ROLLTAP_ROLES": " ".join(endpoint.roles),
                "ROLLTAP_ROLE_CONTEXTS": " ".join(map(str, endpoint.roles.values())),
                "ROLLTAP_PROMPT": job.instruction,
                "OPENAI_BASE_URL": endpoint.v1,
                "OPENAI_API_BASE": endpoint.v1,
                "OPENAI_API_KEY": endpoint.key,
                "OPENAI_MODEL": endpoint.model,
                "ANTHROPIC_BASE_URL": endpoint.base_url,
                "ANTHROPIC_API_KEY": endpoint.key,
                "GOOGLE_GEMINI_BASE_URL": endpoint.base_url,
                "GEMINI_API_KEY": endpoint.key,
            },
            stdin="" if prompt_in_argv else job.instruction,
        )
