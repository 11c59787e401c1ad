"""The ways in which clients switch thinking: each has its meaning, in Chat and Responses alike."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.protocols.conversation import Choice, Message, Reasoning, ReplyEnded, ReplyStarted, Text, Usage
from tests.dialects import DIALECTS

SAID = {
    "thinking": lambda sampling: sampling.thinking,
    "effort": lambda sampling: sampling.effort,
    "budget": lambda sampling: sampling.thinking_budget,
    "keep": lambda sampling: sampling.keep_thinking,
}


def said(sampling: Any) -> dict[str, Any]:
    return {name: value for name, read in SAID.items() if (value := read(sampling)) is not None}


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"thinking": {"type": "enabled"}}, {"thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {"thinking": True}),
        ({"thinking": {"type": "auto"}}, {}),
        ({"thinking": {"type": "off"}}, {"thinking": False}),
        ({"thinking": {"type": ""}}, {}),
        ({"thinking": {}}, {}),
        ({"thinking": None}, {}),
        ({"thinking": True}, {"thinking": True}),
        ({"thinking": False}, {"thinking": False}),
        ({"thinking": "disabled"}, {"thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"thinking": True, "budget": 2048}),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, {"thinking": True, "keep": True}),
        ({"thinking": {"type": "enabled", "keep": "all"}}, {"thinking": True, "keep": True}),
        ({"reasoning": {"effort": "low"}}, {"thinking": True, "effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"thinking": False, "effort": "none"}),
        ({"reasoning": {"effort": "off"}}, {"thinking": False, "effort": "none"}),
        ({"reasoning": {"enabled": True}}, {"thinking": True}),
        ({"reasoning": {"enabled": False}}, {"thinking": False}),
        ({"reasoning": {"max_tokens": 900}}, {"thinking": True, "budget": 900}),
        ({"reasoning": {"max_tokens": 0}}, {"thinking": False}),
        ({"enable_thinking": False}, {"thinking": False}),
        ({"enable_thinking": True, "thinking_budget": 64}, {"thinking": True, "budget": 64}),
        ({"thinking_budget": -1}, {}),
        ({"preserve_thinking": True}, {"keep": True}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"thinking": False}),
        ({"chat_template_kwargs": {"thinking": True}}, {"thinking": True}),
        ({"chat_template_kwargs": {"preserve_thinking": True}}, {"keep": True}),
        ({"chat_template_kwargs": {"clear_thinking": False}}, {"keep": True}),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, {"thinking": True, "effort": "high"}),
    ],
)
def test_a_switch_has_its_meaning(parse: Any, dialect: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert said(parse(dialect, **fields).sampling) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "off"}, {"thinking": False, "effort": "none"}),
        ({"reasoning_effort": False}, {"thinking": False, "effort": "none"}),
        ({"reasoning_effort": "auto"}, {}),
        ({"reasoning": "low"}, {"thinking": True, "effort": "low"}),
        ({"reasoning": False}, {"thinking": False}),
        ({"include_reasoning": True}, {}),
    ],
)
def test_words_of_chat(parse: Any, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert said(parse("openai_chat", **fields).sampling) == expected


@pytest.mark.parametrize(
    ("dialect", "fields", "param"),
    [
        ("openai_chat", {"thinking": {"type": "sometimes"}}, "thinking.type"),
        ("openai_chat", {"thinking": "sometimes"}, "thinking"),
        ("openai_chat", {"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ("openai_chat", {"chat_template_kwargs": {"date_string": "today"}}, "chat_template_kwargs.date_string"),
        ("openai_responses", {"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ("openai_responses", {"reasoning": {"exclude": True}}, "reasoning.exclude"),
        (
            "gemini",
            {"generationConfig": {"thinkingConfig": {"thinkingLevel": "ULTRA"}}},
            "generationConfig.thinkingConfig.thinkingLevel",
        ),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(refusal: Any, dialect: str, fields: Any, param: str) -> None:
    assert refusal(dialect, **fields) == param


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_thinking_that_the_client_excludes_is_not_sent(parse: Any, fields: dict[str, Any]) -> None:
    chat, dialect = parse("openai_chat", **fields), DIALECTS["openai_chat"]
    reply = Message("assistant", (Reasoning("secret"), Text("soil")))
    ended = ReplyEnded((Choice(reply, "stop"),), Usage())
    started = ReplyStarted("c", 0, "m")
    assert b"secret" not in dialect.reply(chat, started, ended)
    assert b"secret" in dialect.reply(parse("openai_chat"), started, ended)


@pytest.mark.parametrize(
    ("dialect", "field"),
    [
        ("openai_chat", "max_tokens"),
        ("openai_chat", "max_completion_tokens"),
        ("openai_responses", "max_output_tokens"),
    ],
)
def test_no_limit_is_minus_one(parse: Any, refusal: Any, dialect: str, field: str) -> None:
    assert parse(dialect, **{field: -1}).sampling.max_tokens is None
    assert refusal(dialect, **{field: 0}) == field
    assert refusal(dialect, **{field: 2**40}) == field


@pytest.mark.parametrize("choice", ["any", {"type": "any"}, {"type": "required"}])
def test_any_is_required(parse: Any, choice: Any) -> None:
    look = {"type": "function", "function": {"name": "look"}}
    assert parse("openai_chat", tools=[look], tool_choice=choice).tool_choice.mode == "required"
    look = {"type": "function", "name": "look"}
    assert parse("openai_responses", tools=[look], tool_choice=choice).tool_choice.mode == "required"


def test_usage_in_every_chunk_is_taken(parse: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert parse("openai_chat", stream_options=options).wire["include_usage"]


def test_what_the_vendors_server_does_is_noted(parse: Any) -> None:
    config = {"task_budget": {"type": "tokens", "total": 64_000}}
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}}]}
    chat = parse("anthropic", output_config=config, context_management=edits)
    assert chat.remarks == ("task_budget", "context_management")
    assert parse("anthropic").remarks == ()


def test_a_later_effort_goes_over_the_request(parse: Any) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
        {"type": "configuration_update", "reasoning": {"effort": "high"}},
        {"type": "configuration_update"},
    ]
    chat = parse("openai_responses", input=items, reasoning={"effort": "medium"})
    assert (chat.sampling.effort, len(chat.messages)) == ("high", 1)
