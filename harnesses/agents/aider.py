"""aider (PyPI): Chat Completions, edits as text instead of tool calls."""

from __future__ import annotations

from rolltap.harnesses.base import Command, Job, Package, refuse_resume


class Aider:
    name = "aider"
    package = Package("pip", "aider-chat", "0.86.2", executable="aider")
    dialect = "openai_chat"
    quirks = (
        "Its first request holds made-up example turns.",
        "It commits its edits, with messages asked for in side calls.",
    )

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        model = f"openai/{job.endpoint.model}"
        silent = ["--no-check-update", "--no-show-release-notes", "--analytics-disable", "--no-show-model-warnings"]
        argv = ["aider", "--model", model, "--weak-model", model, "--yes-always", *silent, "--message", job.instruction]
        return Command(
            tuple(argv),
            env={
                "OPENAI_API_BASE": job.endpoint.v1,
                "OPENAI_API_KEY": job.endpoint.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        )
