"""Registry of the wire protocols (dialects) by name. A dialect is one line here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from rolltap.errors import ConfigError
from rolltap.extras import known_names, lookup
from rolltap.protocols.anthropic.dialect import Anthropic
from rolltap.protocols.base import ClientEnvironment, Dialect
from rolltap.protocols.cache_space import CacheSpace
from rolltap.protocols.gemini.dialect import Gemini
from rolltap.protocols.openai_chat.dialect import OpenAIChat
from rolltap.protocols.openai_completions import OpenAICompletions
from rolltap.protocols.openai_responses.dialect import OpenAIResponses

DIALECTS: dict[str, type[Dialect]] = {
    OpenAIChat.name: OpenAIChat,
    OpenAIResponses.name: OpenAIResponses,
    Anthropic.name: Anthropic,
    Gemini.name: Gemini,
    OpenAICompletions.name: OpenAICompletions,
}

ENTRY_POINTS = "rolltap.dialects"


@cache
def known_dialects() -> Mapping[str, type[Dialect]]:
    """Returns the classes of all dialects by name: ours, then those that installed packages register."""
    names = [*DIALECTS, *(name for name in known_names(DIALECTS, ENTRY_POINTS) if name not in DIALECTS)]
    return {name: lookup("dialect", name, DIALECTS, ENTRY_POINTS, ConfigError) for name in names}


def open_dialects(space: CacheSpace) -> Mapping[str, Dialect]:
    """Returns all dialects by name, with caches of their own in `space`."""
    return {name: dialect(space) for name, dialect in known_dialects().items()}


def client_environments() -> Mapping[ClientEnvironment, set[str]]:
    """The variables that clients read, each with the names of the dialects whose clients read them."""
    environments: dict[ClientEnvironment, set[str]] = {}
    for dialect in known_dialects().values():
        if dialect.client_environment is not None:
            environments.setdefault(dialect.client_environment, set()).add(dialect.name)
    return environments
