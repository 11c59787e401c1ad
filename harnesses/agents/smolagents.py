"""smolagents (PyPI): Chat Completions, no streaming."""

from __future__ import annotations

from rolltap.harnesses.agents.libraries import driver, openai_environment
from rolltap.harnesses.base import Command, Job, Package, refuse_resume


class SmolAgents:
    name = "smolagents"
    package = Package("pip", "smolagents", "1.26.0", executable="python", also=("openai>=2",))
    dialect = "openai_chat"
    quirks = (
        "It rewrites its own calls as prose (`Calling tools: ...`) and trims text: a history_edited break each turn.",
        "At the cap of steps it asks once more for a final answer.",
    )

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        return driver("smolagents", job, openai_environment(job))
