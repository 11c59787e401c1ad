"""The advantage methods by name. A method is one file and one line here."""

from __future__ import annotations

from rolltap.errors import ConfigError
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


def advantage_method(name: str) -> AdvantageMethod:
    """The method called `name`; `ConfigError` lists the known ones."""
    if name not in ADVANTAGES:
        raise ConfigError(f"no advantage method {name!r}; known: {', '.join(ADVANTAGES)}")
    return ADVANTAGES[name]
