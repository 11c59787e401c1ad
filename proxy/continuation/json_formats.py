"""Tool calls whose arguments are JSON: each function reads the blocks of one format."""

from __future__ import annotations

import json
import re

from rolltap.proxy.continuation.json_calls import elements_of, members_of
from rolltap.proxy.continuation.sampled_blocks import Block, SampledCall


def read_hermes(block: Block) -> list[SampledCall] | None:
    """`{"name": NAME, "arguments": {...}}`. The arguments may also be JSON text in a string."""
    call = _call(block.text, "name", "arguments")
    return None if call is None else [call]


def read_llama(block: Block) -> list[SampledCall] | None:
    """Llama 3: `{"name": NAME, "parameters": {...}}`, the whole reply. Another object is text, if it calls no tool."""
    call = _call(block.text, "name", "parameters")
    if call is not None:
        return [call]
    named = re.match(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"', block.text)
    return None if block.is_tagged or (named is not None and block.declares(named[1])) else []


def read_mistral(block: Block) -> list[SampledCall] | None:
    """A JSON list of calls, or (since version 11) `NAME[ARGS]{...}`, with `[CALL_ID]ID` after the name in some."""
    named = re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*)", block.text, re.DOTALL)
    if named is not None:
        return [SampledCall(named[1], named[3].strip(), named[2] or "")]
    elements = elements_of(block.text)
    calls = [_call(element, "name", "arguments", "id") for element in elements or ["null"]]
    return None if None in calls else [call for call in calls if call is not None]


def read_inkling(block: Block) -> list[SampledCall] | None:
    """`NAME<|content_invoke_tool_json|>{"name": NAME, "args": {...}}`."""
    match block.parts(["<|content_invoke_tool_json|>"]):
        case [(name, False), (_, True), (body, False)]:
            call = _call(body, "name", "args")
            return [call] if call is not None and call.name == name else None
    return None


DEEPSEEK_TAGS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


def read_deepseek(block: Block) -> list[SampledCall] | None:
    """DeepSeek-V3: calls of `function<｜tool▁sep｜>NAME` and a fenced JSON block; V3.1: `NAME<｜tool▁sep｜>{...}`."""
    calls: list[SampledCall] = []
    for call in _tagged_calls(block, *DEEPSEEK_TAGS) or ():
        fenced = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```\s*", call.arguments, re.DOTALL)
        if fenced is not None and call.name == "function":
            calls.append(SampledCall(fenced[1], fenced[2].strip()))
        elif call.arguments.lstrip().startswith("{"):
            calls.append(SampledCall(call.name, call.arguments.strip()))
        else:
            return None
    return calls if calls or not block.text.strip() else None


KIMI_TAGS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")


def read_kimi(block: Block) -> list[SampledCall] | None:
    """Kimi K2: calls of `functions.NAME:NUMBER` and JSON. The prefix may be missing if the tool is declared."""
    calls: list[SampledCall] = []
    for call in _tagged_calls(block, *KIMI_TAGS) or ():
        named = re.fullmatch(r"(functions\.)?(.+):[0-9]+", call.name.strip(), re.DOTALL)
        if named is None or not (named[1] or block.declares(named[2])):
            return None
        calls.append(SampledCall(named[2], call.arguments.strip(), named[0]))
    return calls if calls or not block.text.strip() else None


def _tagged_calls(block: Block, opening: str, middle: str, closing: str) -> list[SampledCall] | None:
    """Calls of a name and arguments between tags, with white space between the calls; None if more is there."""
    calls: list[SampledCall] = []
    parts = [part for part in block.parts((opening, middle, closing)) if part.is_tag or part.text.strip()]
    for at in range(0, len(parts), 5):
        match parts[at : at + 5]:
            case [(first, True), (name, False), (second, True), (arguments, False), (third, True)]:
                if (first, second, third) != (opening, middle, closing):
                    return None
                calls.append(SampledCall(name, arguments))
            case _:
                return None
    return calls


def _call(text: str, name: str, arguments: str, id: str = "") -> SampledCall | None:
    """A call that is a JSON object with exactly these keys; that of the id may be missing."""
    members = members_of(text)
    if members is None or {name, arguments} != members.keys() - {id}:
        return None
    values = {key: json.loads(members[key]) for key in (name, id) if key in members}
    if not all(isinstance(value, str) for value in values.values()):
        return None
    body = members[arguments]
    return SampledCall(values[name], json.loads(body) if body.startswith('"') else body, values.get(id, ""))
