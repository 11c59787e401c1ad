"""Cline (npm): Chat Completions, streaming."""

from __future__ import annotations

from rolltap.harnesses.base import Command, Job, Package, refuse_resume

SCRIPT = 'cline auth -p openai -k "$ROLLTAP_KEY" -m "$ROLLTAP_MODEL" -b "$ROLLTAP_BASE" >/dev/null && exec cline "$1"'
"""Cline stores its provider in HOME, which only its own command can write."""


class Cline:
    name = "cline"
    package = Package("npm", "cline", "3.0.65", executable="cline")
    dialect = "openai_chat"
    quirks = (
        "It re-serialises tool arguments; invalid ones come back as {}.",
        "After a dropped stream both attempts stand in one message, text and calls doubled.",
        "An error in mid-stream ends the run; a clean end without [DONE] passes for a final answer.",
        "Subagents are unmarked.",
    )

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        endpoint = job.endpoint
        return Command(
            ("/bin/sh", "-c", SCRIPT, "cline", job.instruction),
            env={
                "ROLLTAP_KEY": endpoint.key,
                "ROLLTAP_MODEL": endpoint.model,
                "ROLLTAP_BASE": endpoint.v1,
                "CLINE_TELEMETRY_DISABLED": "1",
                "CLINE_NO_AUTO_UPDATE": "1",
            },
        )
