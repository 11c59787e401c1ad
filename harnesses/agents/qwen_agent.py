"""Qwen-Agent (PyPI): Chat Completions, streaming."""

from __future__ import annotations

from rolltap.harnesses.agents.libraries import driver, openai_environment
from rolltap.harnesses.base import Command, Job, Package, refuse_resume


class QwenAgent:
    name = "qwen-agent"
    package = Package(
        "pip",
        "qwen-agent",
        "0.0.34",
        executable="python",
        also=("numpy>=2", "soundfile>=0.13", "python-dateutil>=2.9", "tqdm>=4.67"),
    )
    dialect = "openai_chat"
    quirks = (
        "It sends a random seed with each call.",
        "Tool messages name their call in `id` instead of `tool_call_id`.",
    )

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        endpoint = job.endpoint
        room = {"ROLLTAP_INPUT_TOKENS": str(endpoint.context - endpoint.reserve)} if endpoint.context else {}
        return driver("qwen_agent", job, {**openai_environment(job), **room})
