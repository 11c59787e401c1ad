"""A template that writes calls in its own way teaches it: templates are generated, and what they write is read."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rolltap.protocols.conversation import Message, Reasoning, Text, Tool, ToolCall
from rolltap.proxy.continuation.fit import find_fitting
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import LEARNED, TemplateRenderer

from .making import fed, tokenizer_with
from .test_streamed_calls import accumulated

TOOLS = tuple(
    Tool(name, "", {"type": "object", "properties": {"text": {"type": "string"}, "more": {}}})
    for name in ("bash", "read_file", "mcp__github__list-issues")
)
TAGS = ("<|{}|> <|/{}|>", "<{}> </{}>", "[{}] [/{}]", "<|{}_start|> <|{}_end|>", "<x:{}> </x:{}>", "<｜{}｜> <｜/{}｜>")
JSON_STYLES = {
    "an object": '{{"NAME": {name}, "ARGS": {args}}}',
    "an object with an id": '{{"ID": {id}, "NAME": {name}, "ARGS": {args}}}',
    "an object with more": '{{"kind": "call", "NAME": {name}, "n": 1, "ARGS": {args}}}',
    "the name as key": "{{ {name}: {args} }}",
}
OTHER_STYLES = {
    "a name and a tag": "{bare}MIDDLE{args}",
    "a name in quotes": 'to="{bare}"MIDDLE{args}',
    "an id, a name": "{bare_id}BEFOREMIDDLE{bare}MIDDLE{args}",
    "elements": "<fn={bare}>\n{values}</fn>",
    "elements with names": '<call name="{bare}">{values}</call>',
    "keys and values": "{bare}{values}",
}
VALUES = {
    "elements": "<arg={key}>\n{value}\n</arg>\n",
    "elements with names": '<value name="{key}">{value}</value>',
    "keys and values": 'KEY{key}KEYENDVALUE type="{type}">{value}VALUEEND',
}


@dataclass(frozen=True)
class Form:
    """How a made-up template writes calls. `tokens` are added to the vocabulary; none: its tags are ordinary text."""

    style: str
    template: str
    tokens: tuple[str, ...]

    @property
    def is_json(self) -> bool:
        return self.style not in VALUES


def drawn(seed: int) -> Form:
    chance = random.Random(seed)
    words = [f"{chance.choice('abcdfg')}{word}" for word in ("alls", "tem", "iddle", "ey", "al", "hink")]
    pairs = [chance.choice(TAGS).format(word, word).split() for word in words]
    block, each, middle, key, value, _ = pairs
    thinking = chance.choice([["<think>", "</think>"], ["<seed:think>", "</seed:think>"], ["[THINK]", "[/THINK]"]])
    style = chance.choice([*JSON_STYLES, *OTHER_STYLES])
    space = chance.choice(["", "\n", " "])
    call = {**JSON_STYLES, **OTHER_STYLES}[style]
    names = chance.choice([("name", "arguments"), ("tool_name", "parameters"), ("fn", "kwargs"), ("function", "args")])
    for word, text in zip(("NAME", "ARGS"), names, strict=True):
        call = call.replace(f'"{word}"', f'"{text}"')
    call = call.replace('"ID"', f'"{chance.choice(["id", "call_id"])}"')
    shape = chance.choice(["a list", "a block each", "each in a block", "lines", "an open list"])
    if style in OTHER_STYLES and shape in ("a list", "lines", "an open list"):
        shape = "each in a block"
    open_, close, lead, tail, between = {
        "a list": (f"{block[0]}{space}[", f"]{space}{block[1]}", "", "", ", "),
        "a block each": ("", "", f"{block[0]}{space}", f"{space}{block[1]}", chance.choice(["", "\n"])),
        "each in a block": (block[0] + space, space + block[1], each[0] + space, space + each[1], space),
        "lines": (f"{block[0]}\n", f"\n{block[1]}", "", "", "\n"),
        "an open list": (f"{block[0]}{space}[", "]", "", "", ", "),
    }[shape]
    row = (
        call.replace("BEFOREMIDDLE", middle[1])
        .replace("MIDDLE", middle[0])
        .format(
            name="{{ c.function.name | tojson }}",
            bare="{{ c.function.name }}",
            id="{{ c.id | tojson }}",
            bare_id="{{ c.id }}",
            args="{{ c.function.arguments | tojson }}",
            values="{% for k, v in c.function.arguments.items() %}"
            + VALUES.get(style, "")
            .replace("KEYEND", key[1]).replace("KEY", key[0])
            .replace("VALUEEND", value[1]).replace("VALUE", value[0].rstrip(">]"))
            .format(
                key="{{ k }}",
                type="{{ 'string' if v is string else 'other' }}",
                value="{{ v if v is string else v | tojson }}",
            )
            + "{% endfor %}",
        )
    )  # fmt: skip
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        f"{{% if m.reasoning_content %}}{thinking[0]}{{{{ m.reasoning_content }}}}{thinking[1]}\n{{% endif %}}"
        f"{{{{ m.content or '' }}}}{{% if m.tool_calls %}}{open_}{{% for c in m.tool_calls %}}{lead}{row}{tail}"
        f"{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{close}{{% endif %}}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    are_tokens = chance.random() < 0.6
    tags = [*block, *each, *middle, *key, *value] if are_tokens else []
    used = dict.fromkeys([*(tag for tag in tags if tag in template), *thinking])
    return Form(style, template, tuple(used))


def value(chance: random.Random, tokens: tuple[str, ...], *, is_json: bool) -> Any:
    """A value of an argument; as bare text it holds no tag and no white space at its ends."""
    texts = ["ls -la", "naïve 🙂 'quoted' \"so\"", "line 1\nline 2", "a < b && c > d", "x" * 50]
    if is_json:
        texts += [f"a {token} b" for token in tokens] + ["]}", "{", '"}', "</call>", " blank ", ""]
    others: list[Any] = [1, 2.5, True, None, [1, "two", {"three": 3}], {"a": {"b": []}}]
    return chance.choice(texts if chance.random() < 0.7 else others)


def turn(chance: random.Random, form: Form) -> Message:
    calls = tuple(
        ToolCall(
            f"{'abc'[at] * 9}",
            chance.choice(TOOLS).name,
            json.dumps(
                {
                    key: value(chance, form.tokens, is_json=form.is_json) if key == "more" else "some text"
                    for key in chance.sample(["text", "more"], chance.randrange(1, 3))
                }
            ),
        )
        for at in range(chance.randrange(1, 4))
    )
    thought = (Reasoning("I look."),) if chance.random() < 0.5 else ()
    said = (Text("I begin."),) if chance.random() < 0.5 else ()
    return Message("assistant", (*thought, *said), calls)


def seen(calls: Any) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("seeds", [range(40), range(40, 80), range(80, 120)], ids=str)
def test_what_a_template_writes_is_read(seeds: range, tmp_path: Path) -> None:
    """120 templates, of which six turns each are read whole and as a stream."""
    for seed in seeds:
        form, chance = drawn(seed), random.Random(seed)
        renderer = TemplateRenderer(tokenizer_with(tmp_path / str(seed), form.template, *form.tokens))
        assert renderer.tool_format != "none", (seed, form)
        question = Message("user", (Text("question"),))
        for _ in range(6 if renderer.tool_format == LEARNED else 0):
            message = turn(chance, form)
            prompt = renderer.render([question], TOOLS, thinking=True)
            text = renderer._text([question, message], TOOLS, prompt=False, thinking=True)
            sampled = renderer.tokenizer.encode(text.rstrip("\n"))[len(prompt) :]
            parsed = renderer.parse(sampled, prompt, TOOLS)
            assert seen(parsed.tool_calls) == seen(message.tool_calls), (seed, form, text)
            assert all(call.ok for call in parsed.tool_calls)
            assert ((parsed.reasoning or ""), parsed.text.strip()) == (message.reasoning or "", message.text), text
            parser = ReplyParser(renderer, prompt, TOOLS, (), lambda at: f"id{at}")
            events, choice = fed(parser, sampled, [], "stop")
            given = [each.given_id for each in choice.message.tool_calls]
            assert given in ([call.id for call in message.tool_calls], ["" for _ in given])
            streamed = accumulated(events)
            assert (streamed.parts, seen(streamed.tool_calls)) == (choice.message.parts, seen(message.tool_calls))
            assert seen(choice.message.tool_calls) == seen(message.tool_calls)
            assert not parser.unparsable


@pytest.mark.parametrize("seeds", [range(30)], ids=str)
def test_what_quotes_a_call_in_ordinary_text_is_text_without_tools(seeds: range, tmp_path: Path) -> None:
    """As a summary of a conversation does, which harnesses ask for without tools."""
    quoted = 0
    for seed in seeds:
        form, chance = drawn(seed), random.Random(seed)
        if any(token in form.template.partition("tool_calls")[2] for token in form.tokens):
            continue
        renderer = TemplateRenderer(tokenizer_with(tmp_path / str(seed), form.template, *form.tokens))
        question = Message("user", (Text("question"),))
        message = Message("assistant", (), turn(chance, form).tool_calls)
        prompt = renderer.render([question], TOOLS, thinking=True)
        text = renderer._text([question, message], TOOLS, prompt=False, thinking=True)
        sampled = renderer.tokenizer.encode(text.rstrip("\n"))[len(prompt) :]
        parsed = renderer.parse(sampled, prompt, ())
        assert (parsed.tool_calls, parsed.text.strip() != "") == ((), True), (seed, text)
        assert renderer.parse(sampled, prompt, TOOLS).tool_calls
        quoted += 1
    assert quoted > 5


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}END{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("end", ["\n<|im_end|>\n", "<|end_text|><|im_end|>\n"])
def test_a_turn_ends_with_the_token_that_ends_replies(tmp_path: Path, end: str) -> None:
    """And not with the line break or the end of its text before that token."""
    renderer = TemplateRenderer(tokenizer_with(tmp_path, TURNS.replace("END", end), "<|end_text|>"))
    assert renderer.stop_token_ids == (renderer.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert [result.scenario for result in renderer.audit if result.admitted][:1] == ["user"]
    sampled = renderer.tokenizer.encode("one\n\ntwo" + end.strip())
    assert renderer.parse(sampled, [], ()).text.replace("<|end_text|>", "").strip() == "one\n\ntwo"


def test_a_header_with_other_white_space_is_no_part_of_a_call(tmp_path: Path) -> None:
    """Granite's 20B code model: the header is a part of a token that differs."""
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}{% for c in m.tool_calls %}\n<function_call> "
        "{{ c.function | tojson }}{% endfor %}\n{% else %} {{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer = TemplateRenderer(tokenizer_with(tmp_path, template))
    block = '<function_call> {"name": "bash", "arguments": {"text": "ls: a"}}'
    parsed = renderer.parse(renderer.tokenizer.encode(f"\n{block}\n{block}\n<|im_end|>"), [], TOOLS)
    assert renderer.tool_format == LEARNED
    assert seen(parsed.tool_calls) == [("bash", {"text": "ls: a"})] * 2


def test_a_template_that_needs_descriptions_of_parameters_gets_empty_ones(tmp_path: Path) -> None:
    fields = "{% for k, v in t.function.parameters.properties.items() %}{{ k + ': ' + v.description }}\n{% endfor %}"
    template = "{% for t in tools or () %}{{ t.function.name }}(" + fields + "){% endfor %}"
    template += TURNS.replace("END", "<|im_end|>\n")
    renderer = TemplateRenderer(tokenizer_with(tmp_path, template))
    tools = (Tool("look", "", {"type": "object", "properties": {"a": {}, "b": {"description": "It."}}}), Tool("go", ""))
    prompt = renderer.render([Message("user", (Text("question"),))], tools, thinking=True)
    assert renderer.tokenizer.decode(prompt).startswith("look(a: \nb: It.\n)go()<|im_start|>user\n")


def test_a_template_that_needs_a_list_of_tools_gets_an_empty_one(tmp_path: Path) -> None:
    template = "{% for t in tools %}{{ t.function.name }}\n{% endfor %}" + TURNS.replace("END", "<|im_end|>\n")
    renderer = TemplateRenderer(tokenizer_with(tmp_path, template))
    prompt = renderer.render([Message("user", (Text("question"),))], (), thinking=True)
    assert renderer.tokenizer.decode(prompt) == "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"


LATE = (
    "{% for m in messages %}{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}"
    "<|im_start|>user\n{{ messages[0].content }} {{ m.content }}<|im_end|>\n{% elif m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{% if m.tool_calls %}<tool_call>\n{{ m.tool_calls[0].function | tojson }}\n</tool_call>"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAIRED = (
    "{% if messages[0].role == 'system' %}<|im_start|>user\n{{ messages[0].content }} {{ messages[1].content }}"
    "<|im_end|>\n{% set messages = messages[2:] %}{% endif %}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system message here') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [LATE, PAIRED], ids=["before the last user's", "beside the second message"])
def test_no_system_message_is_lost(template: str, tmp_path: Path) -> None:
    """Mistral's template writes it only if a user's message is the last; Gemma's takes it with one other message."""
    renderer = TemplateRenderer(tokenizer_with(tmp_path, template))
    fitting = find_fitting(renderer)
    call = ToolCall("call_1", "bash", '{"text": "ls"}')
    turns = [
        Message("user", (Text("question"),)),
        Message("assistant", (), (call,)),
        Message("tool", (Text("out"),), tool_call_id="call_1", name="bash"),
    ]
    for words in (["one"], ["one", "two"], ["one", "two", "three"]):
        messages = [*(Message("system", (Text(word),)) for word in words), *turns]
        prompt = renderer.render(fitting.whole(messages).messages, TOOLS, thinking=True)
        text = renderer.tokenizer.decode(prompt)
        assert all(word in text for word in (*words, "question", "out"))
