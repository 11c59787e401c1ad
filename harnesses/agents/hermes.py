"""Hermes Agent (PyPI, Python 3.12): Chat Completions, streaming."""

from __future__ import annotations

import json

from rolltap.harnesses.base import Command, Job, Package, refuse_resume

LEAST_CONTEXT = 64_000
"""It refuses a model with a smaller context."""
COMPACTION = {"protect_last_n": 4, "target_ratio": 0.1}
"""What a compaction keeps. By default 20 messages and a fifth of the context, counted as a token for four characters:
too much where the results of tools have a token for each.
"""


class Hermes:
    name = "hermes"
    package = Package("pip", "hermes-agent", "0.19.0", executable="hermes", python=(3, 12))
    dialect = "openai_chat"
    quirks = (
        "Six probes precede its first call (`/v1/models`, `/api/show` and others); some strip `/v1` from the base URL.",
        "It re-serialises tool arguments, trims text and drops reasoning from history.",
    )

    def launch(self, job: Job) -> Command:
        refuse_resume(self.name, job)
        told = job.endpoint.context
        model = {
            **({"context_length": max(told, LEAST_CONTEXT)} if told else {}),
            "default": job.endpoint.model,
            "provider": "custom",
            "base_url": job.endpoint.v1,
            "api_key": job.endpoint.key,
        }
        compression = {"compression": COMPACTION} if told else {}
        return Command(
            ("hermes", "chat", "--yolo", "-Q", "-q", job.instruction),
            env={
                "OPENAI_BASE_URL": job.endpoint.v1,
                "OPENAI_API_KEY": job.endpoint.key,
                "HERMES_HOME": str(job.home / ".hermes"),
            },
            files={".hermes/config.yaml": json.dumps({"model": model, **compression})},  # JSON is YAML
        )
