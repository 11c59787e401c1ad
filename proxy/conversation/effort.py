"""Levels of reasoning effort: in requests, and in the prompts of a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rolltap.proxy.conversation.chat import Sampling

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""The levels of all protocols, the smallest first. With "none" a model is to answer without thinking."""

BUDGETS = ((1_024, "low"), (8_192, "medium"))
"""Thinking tokens up to which a budget is a level, as Google's OpenAI interface has it; a larger one is "high"."""


@dataclass(frozen=True, slots=True)
class Efforts:
    """The effort levels of a model's prompt. A prompt without a level equals the one with the `default` level.

    `levels` change the prompt or are its default. `silent` levels are accepted without an effect. The template refuses
    all others.
    """

    levels: tuple[str, ...] = ()
    default: str = ""
    silent: tuple[str, ...] = ()

    def level(self, asked: str) -> str:
        """The prompt's level for a requested level; "" for a prompt without a level.

        A level that the template refuses becomes the nearest one, the higher of two. "none" becomes the smallest level
        if thinking cannot be switched off.
        """
        if not asked or not self.levels or asked in self.silent or (asked == "none" and not self.default):
            return ""
        rank = EFFORTS.index
        nearest = min(self.levels, key=lambda level: (abs(rank(level) - rank(asked)), -rank(level)))
        return "" if nearest == self.default else nearest


def find_efforts(probe: Callable[[str], Hashable | None]) -> Efforts:
    """The levels of a model whose prompt for a level ("": none) `probe` gives; None where the template refuses it."""
    prompts = {level: prompt for level in EFFORTS[1:] if (prompt := probe(level)) is not None}
    plain = probe("")
    same = tuple(level for level, prompt in prompts.items() if prompt == plain)
    if len(same) == len(prompts):
        return Efforts()
    default = same[0] if len(same) == 1 else ""
    levels = tuple(level for level in prompts if level not in same or level == default)
    return Efforts(levels, default, () if default else same)


def asked_effort(sampling: Sampling) -> str:
    """The level that a request asks for, by name or by its thinking budget; "" if it asks for none."""
    if sampling.effort is not None:
        return sampling.effort
    if sampling.thinking_budget is None:
        return ""
    return next((level for most, level in BUDGETS if sampling.thinking_budget <= most), "high")
