"""The advantage methods by name: one file and one line here, or an entry point `rolltap.advantages` elsewhere."""

from __future__ import annotations

from rolltap.errors import ConfigError
from rolltap.plugins import known_names, lookup
from rolltap.trainer_client.advantages.base import AdvantageMethod
from rolltap.trainer_client.advantages.dr_grpo import dr_grpo
from rolltap.trainer_client.advantages.grpo import grpo
from rolltap.trainer_client.advantages.lite_ppo import lite_ppo
from rolltap.trainer_client.advantages.reinforce import reinforce
from rolltap.trainer_client.advantages.rloo import rloo

ADVANTAGES: dict[str, AdvantageMethod] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "lite_ppo": lite_ppo,
    "reinforce": reinforce,
}

ENTRY_POINTS = "rolltap.advantages"


def advantage_method(name: str) -> AdvantageMethod:
    """The method called `name`; `ConfigError` lists the known ones."""
    return lookup("advantage method", name, ADVANTAGES, ENTRY_POINTS, ConfigError)


def method_names() -> list[str]:
    """Our methods and those of installed packages."""
    return known_names(ADVANTAGES, ENTRY_POINTS)
