"""Levels of reasoning effort: those that requests ask for, and those that a model's prompt can say."""

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
    """What a model's prompt does with a level. A prompt that says the `default` level is the one of no level.

    `levels` change the prompt or are its default; `silent` ones are taken and change nothing; all others are refused by
    the model's template.
    """

    levels: tuple[str, ...] = ()
    default: str = ""
    silent: tuple[str, ...] = ()

    def level(self, asked: str) -> str:
        """The level that the prompt says for the one that was asked for; "" for the prompt of no level.

        One that the template refuses is its nearest, of two the higher. "none", where thinking can't be switched off,
        is the smallest.
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
    """The level that a request asks for, by name or by its budget of thinking tokens; "" for none."""
    if sampling.effort is not None:
        return sampling.effort
    if sampling.thinking_budget is None:
        return ""
    return next((level for most, level in BUDGETS if sampling.thinking_budget <= most), "high")
