"""Maps Harbor's agent names to our harnesses and to the protocols that the agents speak."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.agents.claude_code import claude_window
from rolltap.harnesses.agents.install import Installation, find, not_installed, own
from rolltap.harnesses.agents.registry import get_harness
from rolltap.harnesses.base import Endpoint, Harness

OUR_NAMES = {"qwen-coder": "qwen-code", "cline-cli": "cline", "vibe": "mistral-vibe"}
"""Our harness's name by Harbor's agent name, where the two names differ."""

PROVIDERS = {"openai_chat": "openai", "openai_responses": "openai", "anthropic": "anthropic", "gemini": "gemini"}
"""Harbor's provider by dialect. It is a prefix of the model's name: `anthropic/NAME`."""

OF_ONE_PROTOCOL = {"claude-code": "anthropic", "codex": "openai_responses", "gemini-cli": "gemini"}
"""The dialect of agents that speak only one. They take the model's name without a provider."""


def harness_of(agent: str) -> Harness | None:
    """Our harness for Harbor's `agent`; None if there is none, or if `agent` is empty."""
    try:
        return get_harness(OUR_NAMES.get(agent, agent))
    except TaskInvalid:
        return None


def installation_of(agent: str) -> Installation | None:
    """The installation of `agent` on this machine: the tested release or, without it, the user's own.

    None if there is no harness for the agent, or the harness has no package. Raises `RuntimeFailed` if nothing is
    installed; the message says how to install it.
    """
    harness = harness_of(agent)
    if harness is None or harness.package is None:
        return None
    installation = find(harness.package) or own(harness.package)
    if installation is None:
        raise RuntimeFailed(not_installed(harness))
    return installation


@dataclass(frozen=True, slots=True)
class AgentConnection:
    """How a Harbor agent connects to a session: the model's name, and variables for the agent's commands."""

    model: str
    env: dict[str, str]


def connection_to(endpoint: Endpoint, agent: str, dialect: str = "") -> AgentConnection:
    """The connection of `agent` to `endpoint`, in its only dialect or in `dialect` (default: `openai_chat`).

    The context's length is in it for Claude Code; for the others Harbor has no variable.

    Raises `TaskInvalid` if the agent does not speak `dialect`; the message lists those that it speaks.
    """
    only_dialect = OF_ONE_PROTOCOL.get(agent)
    if dialect and (dialect not in PROVIDERS or only_dialect not in (None, dialect)):
        known = only_dialect or ", ".join(PROVIDERS)
        raise TaskInvalid(f"{agent} speaks {known}, not {dialect!r}", param="dialect")
    provider = PROVIDERS[only_dialect or dialect or "openai_chat"]
    variables = {
        "openai": {"OPENAI_API_KEY": endpoint.key, "OPENAI_BASE_URL": endpoint.v1},
        "anthropic": {"ANTHROPIC_API_KEY": endpoint.key, "ANTHROPIC_BASE_URL": endpoint.base_url},
        "gemini": {"GEMINI_API_KEY": endpoint.key, "GOOGLE_GEMINI_BASE_URL": endpoint.base_url},
    }
    window = claude_window(endpoint) if agent == "claude-code" else {}
    model = endpoint.model if only_dialect else f"{provider}/{endpoint.model}"
    return AgentConnection(model, {**variables[provider], **window})
