"""gptme (PyPI): Chat Completions through its `local` provider."""

from __future__ import annotations

from rolltap.harnesses.base import Command, Job, Package, refuse_resume


class Gptme:
    name = "gptme"
    package = Package("pip", "gptme", "0.35.1", executable="gptme")
    dialect = "openai_chat"
    quirks = (
        "Through its `openai` provider it speaks Responses, and merges tool output into `instructions`, which then "
        "change every turn; the `local` provider of this definition does not.",
        "A conversation's name is asked for in a side call.",
    )

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        return Command(
            (
                "gptme",
                "--non-interactive",
                "--name",
                "rollout",
                "--model",
                f"local/{job.endpoint.model}",
                job.instruction,
            ),
            env={"OPENAI_BASE_URL": job.endpoint.v1, "OPENAI_API_KEY": job.endpoint.key},
        )
