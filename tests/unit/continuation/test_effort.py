"""A level of effort stands in the prompt where the model's template has one, and changes the frame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolltap.protocols.conversation import Message, Reasoning, Sampling, Text
from rolltap.protocols.thinking import Efforts, asked_effort, find_efforts
from rolltap.proxy.continuation.rendering import FamilyRenderer, TokenRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.types import BreakReason

from .conftest import World
from .making import tokenizer_with, trl_template
from .planning import run_steps

VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
LOW, XHIGH = "Reasoning effort is set to low", "Reasoning effort is set to xhigh"


def user(text: str) -> Message:
    return Message("user", (Text(text),))


@pytest.fixture(scope="module", params=["family", "template"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TokenRenderer:
    """Qwen3.8, which knows low, medium and xhigh, its default."""
    tokenizer = tokenizer_with(tmp_path_factory.mktemp("qwen"), trl_template("qwen3_8_training"), *VISION)
    return FamilyRenderer("qwen3.8", tokenizer) if request.param == "family" else TemplateRenderer(tokenizer)


def prompt_of(renderer: TokenRenderer, level: str, *messages: Message) -> str:
    shown = renderer.at_effort(level) if level else renderer
    return renderer.tokenizer.decode(shown.render(messages or (user("hi"),), (), thinking=True))


def test_a_template_says_which_levels_it_has(qwen: Any) -> None:
    assert (set(qwen.efforts.levels), qwen.efforts.default) == ({"low", "medium", "xhigh"}, "xhigh")
    assert LOW in prompt_of(qwen, "low")
    assert prompt_of(qwen, "medium") not in (prompt_of(qwen, "low"), prompt_of(qwen, ""))
    assert prompt_of(qwen, "xhigh") == prompt_of(qwen, "")
    assert XHIGH in prompt_of(qwen, "")
    assert qwen.switches_thinking


def test_templates_without_levels_have_none(either: Any, tmp_path: Path) -> None:
    assert either.efforts == Efforts()
    assert either.efforts.level("high") == ""
    assert not TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen2_5"))).switches_thinking


SWITCHES = {
    "enable_thinking": "{% if enable_thinking %}on{% else %}off{% endif %}",
    "thinking": "{% if thinking is defined and thinking %}on{% else %}off{% endif %}",
    "thinking_mode": "{% if thinking_mode == 'disabled' %}off{% else %}on{% endif %}",
    "skip_thinking": "{% if skip_thinking | default(false) %}off{% else %}on{% endif %}",
}
"""By which names vendors' templates (DeepSeek-V3.1, Kimi K3, Granite; MiniMax M3; Cohere) switch thinking."""


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_template_may_switch_thinking_by_any_name(switch: str, tmp_path: Path) -> None:
    renderer = TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen2_5") + SWITCHES[switch]))
    assert renderer.switches_thinking
    for thinking, word in ((True, "on"), (False, "off")):
        prompt = renderer.tokenizer.decode(renderer.render([user("hi")], (), thinking=thinking))
        assert prompt.endswith(word)


def test_a_level_may_have_another_name(tmp_path: Path) -> None:
    level = "{% if thinking_effort in ['low', 'max'] %}{{ thinking_effort }}{% endif %}"
    renderer = TemplateRenderer(tokenizer_with(tmp_path, trl_template("qwen2_5") + level))
    assert renderer.efforts.levels == ("low", "max")


def test_gpt_oss_takes_any_name_and_cannot_be_told_not_to_think(tmp_path: Path) -> None:
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>")
    renderer = TemplateRenderer(tokenizer_with(tmp_path, trl_template("gptoss"), *special))
    assert renderer.efforts.default == "medium"
    assert "Reasoning: high" in prompt_of(renderer, renderer.efforts.level("high"))
    assert not renderer.switches_thinking
    assert "Reasoning: minimal" in prompt_of(renderer, renderer.efforts.level("none"))


@pytest.mark.parametrize(
    ("levels", "default", "asked", "level"),
    [
        (("low", "medium", "high"), "medium", "medium", ""),
        (("low", "medium", "high"), "medium", "xhigh", "high"),
        (("low", "medium", "high"), "medium", "none", "low"),
        (("low", "medium", "xhigh"), "xhigh", "high", ""),  # of two as near, the higher
        (("low", "high", "max"), "max", "medium", "high"),
        (("low", "high"), "", "none", ""),  # what is said unasked may be less: Hunyuan's default is not to think
    ],
)
def test_a_level_that_the_model_lacks_is_its_nearest(
    levels: tuple[str, ...], default: str, asked: str, level: str
) -> None:
    assert Efforts(levels, default).level(asked) == level


def test_a_template_that_looks_for_one_level_only_says_nothing_for_the_others() -> None:
    def probe(level: str) -> str:
        return "brief" if level == "low" else "plain"

    efforts = find_efforts(probe)
    assert (efforts.levels, efforts.default) == (("low",), "")
    assert (efforts.level("low"), efforts.level("high")) == ("low", "")


@pytest.mark.parametrize(("budget", "level"), [(1024, "low"), (4096, "medium"), (31_999, "high"), (None, "")])
def test_a_budget_of_thinking_tokens_is_a_level(budget: int | None, level: str) -> None:
    assert asked_effort(Sampling(thinking_budget=budget)) == level


@pytest.fixture
def plan(qwen: Any) -> tuple[World, Callable[..., Any]]:
    world = World(qwen, history="keep", tools=())

    def planned(level: str, *messages: Message) -> Any:
        request = world.request(*messages)
        return run_steps(world.continuation.steps("next", world.forest, request, thinking=True, effort=level))

    return world, planned


def test_a_conversation_goes_on_at_its_level(plan: Any) -> None:
    world, planned = plan
    world.effort = "low"
    first = world.call(user("hi"), output="<think>\nI greet.\n</think>\n\nHello.<|im_end|>")
    again = planned("low", user("hi"), first.reply, user("and?"))
    assert (again.break_, again.parent, again.shared) == (None, first, len(first.context_ids()))
    assert LOW in world.tokenizer.decode(again.prompt_ids.tolist())


def test_another_level_is_another_frame(plan: Any) -> None:
    world, planned = plan
    first = world.call(user("hi"), output="<think>\nI greet.\n</think>\n\nHello.<|im_end|>")
    other = planned("low", user("hi"), Message("assistant", (Reasoning("I greet."), Text("Hello."))), user("and?"))
    assert other.break_ is not None
    assert (other.break_.reason, other.parent) == (BreakReason.SYSTEM_CHANGED, first)
    assert LOW in world.tokenizer.decode(other.prompt_ids.tolist())
    twin = planned("low", user("hi"))
    assert twin.prompt_ids.tolist() != first.prompt_ids.tolist()
