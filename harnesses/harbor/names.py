"""Harbor's names of agents in our words: the recipe whose release we install, and the protocol that it speaks."""

from __future__ import annotations

from dataclasses import dataclass

from rolltap.errors import RuntimeFailed, TaskInvalid
from rolltap.harnesses.base import Endpoint, Harness
from rolltap.harnesses.install import Installation, find, not_installed, own
from rolltap.harnesses.registry import get_harness

RECIPES = {"qwen-coder": "qwen-code", "cline-cli": "cline", "vibe": "mistral-vibe"}
"""Agents that have another name with us."""

PROVIDERS = {"openai_chat": "openai", "openai_responses": "openai", "anthropic": "anthropic", "gemini": "gemini"}
"""What Harbor calls the maker of a protocol, in the model's name: `anthropic/NAME`."""

OF_ONE_PROTOCOL = {"claude-code": "anthropic", "codex": "openai_responses", "gemini-cli": "gemini"}
"""Agents that speak nothing else, and take the model's bare name."""


def recipe_of(agent: str) -> Harness | None:
    """Our recipe of Harbor's `agent`; None for those that we have none of, and for none."""
    try:
        return get_harness(RECIPES.get(agent, agent))
    except TaskInvalid:
        return None


def installation_of(agent: str) -> Installation | None:
    """The tested release of `agent` on this machine; None where none is needed. `RuntimeFailed` says how to get it."""
    harness = recipe_of(agent)
    if harness is None or harness.package is None:
        return None
    installation = find(harness.package) or own(harness.package)
    if installation is None:
        raise RuntimeFailed(not_installed(harness))
    return installation


@dataclass(frozen=True, slots=True)
class AgentConnection:
    """How one of Harbor's agents is told of a session: the model's name and variables of the agent's phases."""

    model: str
    env: dict[str, str]


def connection_to(endpoint: Endpoint, agent: str, dialect: str = "") -> AgentConnection:
    """For `agent` in its own protocol, or in `dialect` where it can speak several. `TaskInvalid` lists the dialects."""
    only = OF_ONE_PROTOCOL.get(agent)
    if dialect and (dialect not in PROVIDERS or only not in (None, dialect)):
        raise TaskInvalid(f"{agent} speaks {only or ', '.join(PROVIDERS)}, not {dialect!r}", param="dialect")
    provider = PROVIDERS[only or dialect or "openai_chat"]
    env = {
        "openai": {"OPENAI_API_KEY": endpoint.key, "OPENAI_BASE_URL": endpoint.v1},
        "anthropic": {"ANTHROPIC_API_KEY": endpoint.key, "ANTHROPIC_BASE_URL": endpoint.base_url},
        "gemini": {"GEMINI_API_KEY": endpoint.key, "GOOGLE_GEMINI_BASE_URL": endpoint.base_url},
    }
    return AgentConnection(endpoint.model if only else f"{provider}/{endpoint.model}", env[provider])
