"""The formats in which chat templates write tool calls, and the detection of a template's format.

Detection renders a message with a known call. The template's format is the one whose parser returns the same call. The
parsers come from the `renderers` package where it has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rolltap.errors import ConfigError
from rolltap.proxy.continuation.blocks import find_blocks
from rolltap.proxy.continuation.json_calls import HERMES, MISTRAL
from rolltap.proxy.continuation.rendering import ParsedCall, parsed_call, sampled_call
from rolltap.proxy.continuation.tokenizer import HubTokenizer

Read = Callable[[HubTokenizer, list[int]], tuple[list[int], list[ParsedCall]]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`read` splits a reply's ids (without thinking and stop tokens) into the ids of its text, and its calls.

    `opening` and `closing` are the tokens around calls. Without them, a reply is a call only if its text begins with
    one of `beginnings`. `head` matches the text before a call's arguments, if these are JSON in their own block.
    """

    read: Read
    opening: str = ""
    closing: str = ""
    beginnings: tuple[str, ...] = ()
    head: re.Pattern[str] | None = None


def find_tool_format(name: str) -> ToolFormat:
    """The format with this name. Raises `ConfigError`, which lists the known ones."""
    try:
        return TOOL_FORMATS[name]
    except KeyError:
        raise ConfigError(f"no tool format {name!r}; known: {', '.join(TOOL_FORMATS)}") from None


def format_of(tokenizer: HubTokenizer, turn: list[int], name: str, arguments: Mapping[str, Any]) -> str:
    """The name of the format that parses `turn` as a call of tool `name` with `arguments`; "none" if none does."""
    for known, form in TOOL_FORMATS.items():
        _, calls = form.read(tokenizer, turn)
        if [(call.name, call.ok) for call in calls] == [(name, True)] and json.loads(calls[0].arguments) == arguments:
            return known
    return "none"


def _by_renderers(parser: str) -> Read:
    def read(tokenizer: HubTokenizer, ids: list[int]) -> tuple[list[int], list[ParsedCall]]:
        from renderers.parsers import get_tool_parser

        rest, calls = get_tool_parser(parser, tokenizer).extract(ids)
        return rest, [parsed_call(call) for call in calls]

    return read


def _read_deepseek(tokenizer: HubTokenizer, ids: list[int]) -> tuple[list[int], list[ParsedCall]]:
    """DeepSeek-V3: sections of calls. The package's parser reads only the first of its ids."""
    form = TOOL_FORMATS["deepseek"]
    sections = find_blocks(ids, *map(tokenizer.convert_tokens_to_ids, (form.opening, form.closing)))
    read = _by_renderers("deepseek-v3")
    calls = [
        replace(call, block=number)
        for number, section in enumerate(sections)
        for call in read(tokenizer, ids[section])[1]
    ]
    return (ids[: sections[0].start], calls) if sections else (ids, [])


def _read_llama(tokenizer: HubTokenizer, ids: list[int]) -> tuple[list[int], list[ParsedCall]]:
    """Llama 3: the reply is a JSON object `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`."""
    from renderers.parsing import parse_llama_3

    tag = tokenizer.convert_tokens_to_ids("<|python_tag|>")
    body = ids[1:] if tag is not None and ids[:1] == [tag] else ids
    calls = [parsed_call(call) for call in parse_llama_3(tokenizer, body, stop_ids=set()).tool_calls]
    return ([], calls) if calls else (ids, [])


def _read_mistral(tokenizer: HubTokenizer, ids: list[int]) -> tuple[list[int], list[ParsedCall]]:
    """Mistral: `[TOOL_CALLS]` and a JSON list of calls, or (since version 11) `name[ARGS]{...}` after each."""
    sections = find_blocks(ids, tokenizer.convert_tokens_to_ids("[TOOL_CALLS]"), None)
    calls: list[ParsedCall] = []
    for number, section in enumerate(sections):
        text = tokenizer.decode(ids[section][1:]).strip()
        calls += [replace(call, block=number) for call in (_mistral_calls(text) if text else [])]
    return (ids[: sections[0].start], calls) if sections else (ids, [])


def _mistral_calls(section: str) -> list[ParsedCall]:
    named = re.fullmatch(r"([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\](.*)", section, re.DOTALL)
    try:
        if named:
            rows = [{"name": named[1], "arguments": json.loads(named[2])}]
        else:
            whole = json.loads(section)
            rows = whole if isinstance(whole, list) else [whole]
        return [sampled_call(row["name"], row["arguments"], True, section) for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        return [ParsedCall("", "", False, section)]


def _read_nothing(tokenizer: HubTokenizer, ids: list[int]) -> tuple[list[int], list[ParsedCall]]:
    return ids, []


TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(_by_renderers("qwen3"), "<tool_call>", "</tool_call>", head=HERMES),
    "qwen-xml": ToolFormat(_by_renderers("qwen3.5"), "<tool_call>", "</tool_call>"),
    "glm": ToolFormat(_by_renderers("glm"), "<tool_call>", "</tool_call>"),
    "deepseek": ToolFormat(_read_deepseek, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "mistral": ToolFormat(_read_mistral, "[TOOL_CALLS]", head=MISTRAL),
    "llama": ToolFormat(_read_llama, beginnings=("{",)),
    "none": ToolFormat(_read_nothing),
}
