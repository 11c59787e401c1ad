"""Launches an agent library as a command: the library's Python runs a driver script from HOME.

The drivers are `.py.txt` files, as they import their library, which is not installed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from rolltap.harnesses.base import Command, Ending, Job

TURN_LIMIT = 53
"""The drivers' exit code at the turn cap, and where the library gives up on a reply of the model."""


def driver(name: str, job: Job, env: Mapping[str, str]) -> Command:
    """Runs `drivers/<name>.py`. The prompt, the model and the turn cap are in the environment."""
    path = f".rolltap/{name}.py"
    variables = {
        "ROLLTAP_PROMPT": job.instruction,
        "ROLLTAP_MODEL": job.endpoint.model,
        "ROLLTAP_TURNS": str(job.limits.turns),
    }
    return Command(
        ("python", str(job.home / path)),
        env={**variables, **env},
        files={path: files("rolltap.harnesses.agents.drivers").joinpath(f"{name}.py.txt").read_text(encoding="utf-8")},
        endings={TURN_LIMIT: Ending.LIMIT},
    )


def openai_environment(job: Job) -> dict[str, str]:
    """The environment variables of the official OpenAI client."""
    return {"OPENAI_BASE_URL": job.endpoint.v1, "OPENAI_API_KEY": job.endpoint.key}
