"""OpenHands CLI (PyPI, Python 3.12): Chat Completions through LiteLLM, no streaming."""

from __future__ import annotations

from rolltap.harnesses.base import Command, Job, Package, refuse_resume


class OpenHands:
    name = "openhands"
    package = Package("pip", "openhands", "1.16.0", executable="openhands", python=(3, 12))
    dialect = "openai_chat"
    quirks = (
        "It re-serialises tool arguments and adds security_risk to them: a history_edited break.",
        "It drops reasoning from history.",
        "A 400 ends the run with exit code 0. Subagents are unmarked.",
    )

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        argv = ("openhands", "--headless", "--override-with-envs", "--json", "-t", job.instruction)
        return Command(
            argv,
            env={
                "LLM_MODEL": f"openai/{job.endpoint.model}",
                "LLM_BASE_URL": job.endpoint.v1,
                "LLM_API_KEY": job.endpoint.key,
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the internet for prices, and can hang
                "OPENHANDS_SUPPRESS_BANNER": "1",
            },
        )
