"""However its tokens come, a reply is the same, in each format."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolltap.engine.tiny import FOLDER
from rolltap.protocols.conversation import Tool
from rolltap.protocols.handles import MAX_CALLS
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.tokenizer import HubTokenizer

from .conftest import BASH
from .making import (
    DEEPSEEK,
    GLM,
    VISION,
    fed,
    glm_family,
    llama_renderer,
    mistral_renderer,
    tokenizer_with,
    trl_template,
)
from .test_streamed_calls import accumulated

REPLIES = 30
"""Number of random replies in each format."""

TOOLS = (BASH, Tool("exec", "", None, "custom"))
DEEP = "[" * 1_100
TEXTS = (" ", "\n\n", "Hi.", " and ", "ST", "OP", "STOP", "é😀", "</think>", "<think>", "<|im_start|>")
OPENINGS = ("", "", "<think>hm</think>", "<think>a STOP b</think>\n\n", "hm</think>", "<think>", "\n<think>x</think>")
STOPS = ((), (), ("STOP",), ("\n\n",), ("STOP", "\n<tool"), ("}\n",))
PROMPTS = ("", "<think>", "<think>\n\n</think>\n\n")


def _hermes(*bodies: str) -> list[str]:
    return [f"<tool_call>{body}</tool_call>" for body in bodies]


def _sections(*calls: str) -> str:
    block = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{}\n```<｜tool▁call▁end｜>".format
    return f"{DEEPSEEK[0]}{''.join(map(block, calls))}{DEEPSEEK[1]}"


BLOCKS: dict[str, list[str]] = {
    "hermes": _hermes(
        '\n{"name": "bash", "arguments": {"command": "ls </think> <tool_call>"}}\n',
        '{"name": "bash", "arguments": {"n": 12, "m": [1, 1e999]}}',
        '{"arguments": {"a": "STOP"}, "name": "bash"}',
        '{"name": "exec", "arguments": {"input": "print(1)"}}',
        f'{{"name": "bash", "arguments": {{"n": {DEEP}}}}}',
        f'{{"arguments": {{"n": {DEEP}}}, "name": "bash"}}',
        "{broken",
        "",
    ),
    "xml": _hermes(
        "\n<function=bash>\n<parameter=command>\nls </think> STOP\n</parameter>\n</function>\n",
        "<function=exec><parameter=input>print(1)</parameter></function>",
        "<function=bash><parameter=x>NaN</parameter></function>",
        "nothing",
    ),
    "glm": _hermes(
        "bash\n<arg_key>command</arg_key>\n<arg_value>ls </think> STOP</arg_value>\n",
        "exec<arg_key>input</arg_key><arg_value>print(1)</arg_value>",
        "bash<arg_key>x</arg_key><arg_value>NaN</arg_value>",
        "nope\n<arg_key>x",
        "",
    ),
    "mistral": [
        '[TOOL_CALLS]bash[ARGS]{"command": "ls </think>"}',
        '[TOOL_CALLS]bash[ARGS]{"n": 12, "m": NaN}',
        '[TOOL_CALLS]exec[ARGS]{"input": "print(1)"} STOP more',
        '[TOOL_CALLS][{"name": "bash", "arguments": {}}, {"name": "bash", "arguments": {"a": NaN}}]',
        '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "STOP"}}, {"name": "bash", "arguments": {}}]',
        f'[TOOL_CALLS][{{"name": "bash", "arguments": {DEEP}}}]',
        "[TOOL_CALLS]bash STOP",
        "[TOOL_CALLS]",
    ],
    "deepseek": [
        _sections('{"command": "ls"}'),
        _sections('{"command": "</think>"}', '{"a": NaN}'),
        _sections(f'{{"a": {DEEP}}}'),
        _sections(),
    ],
    "learned": [
        '<acts>[{"fn": "bash", "kwargs": {"command": "ls </think> STOP"}}]</acts>',
        '<acts> [ {"fn": "bash", "kwargs": {}}, {"fn": "exec", "kwargs": {"input": "</act"}} ]\n</acts>',
        f'<acts>[{{"fn": "bash", "kwargs": {{"a": {DEEP}}}}}]</acts>',
        '<acts>[{"fn": "bash", "kwargs": {"a": NaN}}]</acts>',
        '<acts>[{"fn": "bash"',
        "<acts></acts>",
        "<acts>",
        "</acts>",
    ],
    "llama": [
        '{"name": "bash", "parameters": {"command": "ls"}}',
        '<|python_tag|>{"name": "bash", "parameters": {"command": "ls"}}',
        f'{{"name": "bash", "parameters": {{"a": {DEEP}}}}}',
    ],
}


def _template(name: str, *special: str, tool_format: str = "") -> Callable[[Path], TemplateRenderer]:
    return lambda folder: TemplateRenderer(tokenizer_with(folder, trl_template(name), *special), tool_format)


def _qwen35(folder: Path) -> FamilyRenderer:
    return FamilyRenderer("qwen3.5", tokenizer_with(folder, trl_template("qwen3_5_think"), *VISION))


def _learned(*special: str) -> Callable[[Path], TemplateRenderer]:
    """A template that writes a list of calls between tags, which are tokens if `special` names them."""
    calls = "[{% for c in m.tool_calls %}{{ {'fn': c.function.name, 'kwargs': c.function.arguments} | tojson }}"
    calls += "{{ '' if loop.last else ', ' }}{% endfor %}]"
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        f"{{% if m.tool_calls %}}<acts>{calls}</acts>{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return lambda folder: TemplateRenderer(tokenizer_with(folder, template, *special))


RENDERERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "qwen3": ("hermes", lambda _: FamilyRenderer("qwen3", HubTokenizer(FOLDER))),
    "qwen3.5": ("xml", _qwen35),
    "glm-4.5": ("glm", glm_family),
    "a Hermes template": ("hermes", _template("qwen3")),
    "an XML template": ("xml", _template("qwen3_5_think")),
    "a GLM template": ("glm", _template("glm4moe", *GLM)),
    "a Mistral template": ("mistral", lambda folder: mistral_renderer(folder, "args")),
    "a DeepSeek template": ("deepseek", _template("qwen3", *DEEPSEEK, tool_format="deepseek")),
    "a Llama template": ("llama", llama_renderer),
    "a learned template": ("learned", _learned("<acts>", "</acts>")),
    "a learned template in text": ("learned", _learned()),
}


def sampled(renderer: Any, blocks: list[str], chance: random.Random) -> list[int]:
    """The ids of a random reply. Some are cut off, some lack a token."""
    text = "".join(chance.choice(blocks if chance.random() < 0.55 else TEXTS) for _ in range(chance.randrange(6)))
    ids = renderer.tokenizer.encode(chance.choice(OPENINGS) + text)
    if chance.random() < 0.25:
        ids = ids[: chance.randrange(len(ids) + 1)]
    if ids and chance.random() < 0.15:
        del ids[chance.randrange(len(ids))]
    return [*ids, renderer.stop_token_ids[0]] if chance.random() < 0.8 else ids


def opened(
    renderer: Any, prompt: list[int], tools: tuple[Tool, ...], stops: tuple[str, ...], max_calls: int
) -> ReplyParser:
    parser = ReplyParser(renderer, prompt, tools, stops, lambda at: f"id{at}")
    parser.max_calls = max_calls
    return parser


@pytest.mark.parametrize("name", RENDERERS)
def test_a_reply_is_the_same_however_its_tokens_come(name: str, tmp_path: Path) -> None:
    form, make = RENDERERS[name]
    renderer, chance = make(tmp_path), random.Random(name)
    for _ in range(REPLIES):
        ids = sampled(renderer, BLOCKS[form], chance)
        prompt = renderer.tokenizer.encode("<|im_start|>assistant\n" + chance.choice(PROMPTS))
        tools, stops = chance.choice([TOOLS, TOOLS, ()]), chance.choice(STOPS)
        max_calls, finish = chance.choice([MAX_CALLS, MAX_CALLS, 0, 1, 2]), chance.choice(["stop", "length"])
        replies = []
        for sizes in ([len(ids)], [], [chance.randrange(1, 7) for _ in ids]):
            parser = opened(renderer, prompt, tools, stops, max_calls)
            events, choice = fed(parser, ids, sizes, finish)
            assert accumulated(events) == choice.message
            replies.append((choice, parser.unparsable, parser.consumed, parser.reasoning_ids))
        assert replies[1:] == replies[:1] * 2, (renderer.tokenizer.decode(ids), stops, max_calls)
        choice, _, consumed, _ = replies[0]
        _, recorded = fed(opened(renderer, prompt, tools, (), max_calls), ids[:consumed], [], finish)
        assert recorded.message.tool_calls == choice.message.tool_calls  # no call on record that no client saw
