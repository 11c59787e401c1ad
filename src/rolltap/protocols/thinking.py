"""What a request asks of thinking: levels of effort, and the switches in OpenAI's protocols.

Switches other than `reasoning_effort` and `reasoning`:

| field | who |
|---|---|
| `thinking: {type, budget_tokens, clear_thinking, keep}` | GLM, DeepSeek, Kimi, Anthropic's own interface to Chat |
| `reasoning: {enabled, effort, max_tokens, exclude}`, `include_reasoning` | OpenRouter |
| `enable_thinking`, `thinking_budget`, `preserve_thinking` | Qwen's service |
| `chat_template_kwargs` | vLLM, SGLang |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from rolltap.protocols.conversation import Sampling
from rolltap.protocols.requests import invalid

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


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "off", "disabled", "auto", "default"]
Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]

_EFFORT_WORDS: dict[str | bool | None, str | None] = {
    "off": "none",
    "disabled": "none",
    False: "none",
    "auto": None,
    "default": None,
    True: None,
}
_ON = frozenset({"on", "enabled", "true", "adaptive"})
_OFF = frozenset({"off", "disabled", "false", "none"})


class Thinking(Struct, forbid_unknown_fields=True, omit_defaults=True):
    type: str | None = None
    budget_tokens: Budget | None = None
    clear_thinking: bool | None = None
    keep: Literal["all", "none"] | None = None


class TemplateArguments(Struct, forbid_unknown_fields=True, omit_defaults=True):
    enable_thinking: bool | None = None
    thinking: bool | None = None
    preserve_thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: Effort | bool | None = None
    thinking_budget: Budget | None = None


class ThinkingSwitches(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body."""

    thinking: bool | str | Thinking | None = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    preserve_thinking: bool | None = None
    clear_thinking: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None


@dataclass(slots=True)
class ThinkingDemand:
    """What a request asks of thinking. None: nothing. `keep`: earlier thinking stays in the prompt."""

    thinking: bool | None = None
    effort: str | None = None
    budget: int | None = None
    keep: bool | None = None

    def think(self, value: bool | None) -> None:
        """Takes the first switch that says something."""
        self.thinking = value if self.thinking is None else self.thinking

    def spend(self, tokens: int | None) -> None:
        """Takes a budget: 0 switches thinking off, -1 leaves it to the model."""
        if tokens == 0:
            self.think(False)
        elif tokens is not None and tokens > 0:
            self.think(True)
            self.budget = tokens if self.budget is None else self.budget

    def try_hard(self, level: str | bool | None) -> None:
        """Takes a level of effort."""
        level = _EFFORT_WORDS.get(level, level)
        self.effort = level if self.effort is None and isinstance(level, str) else self.effort

    def settle(self) -> None:
        """Lets the effort decide where no switch does."""
        if self.effort is not None:
            self.think(self.effort != "none")

    def retain(self, value: bool | None) -> None:
        self.keep = value if self.keep is None else self.keep


def read_switches(head: ThinkingSwitches, effort: str | bool | None) -> ThinkingDemand:
    """The demand of the switches and of an `effort`, which overrides the template's argument."""
    demand = ThinkingDemand()
    template, thinking = head.chat_template_kwargs or TemplateArguments(), head.thinking
    demand.think(head.enable_thinking)
    demand.think(template.enable_thinking)
    demand.think(template.thinking)
    if isinstance(thinking, Thinking):
        demand.think(switch(thinking.type, "thinking.type"))
        demand.spend(thinking.budget_tokens)
        demand.retain(None if thinking.clear_thinking is None else not thinking.clear_thinking)
        demand.retain(None if thinking.keep is None else thinking.keep == "all")
    else:
        demand.think(switch(thinking, "thinking"))
    for budget in (head.thinking_budget, template.thinking_budget):
        demand.spend(budget)
    for preserve in (head.preserve_thinking, template.preserve_thinking):
        demand.retain(preserve)
    for clear in (head.clear_thinking, template.clear_thinking):
        demand.retain(None if clear is None else not clear)
    demand.try_hard(effort)
    demand.try_hard(template.reasoning_effort)
    return demand


def switch(value: bool | str | None, where: str) -> bool | None:
    """A switch that is a boolean or a word. Raises `InvalidRequest` for an unknown word."""
    if value is None or isinstance(value, bool):
        return value
    word = value.strip().lower()
    if word in _ON or word in _OFF:
        return word in _ON
    if word in ("", "auto", "default"):
        return None
    raise invalid(where, f"unknown value {value[:80]!r}; use enabled or disabled")
