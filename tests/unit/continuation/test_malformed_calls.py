"""No call is made of a part of its block, in any format. `malformed` holds the generator, and tries many on command."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from renderers.base import MODEL_RENDERER_MAP

from rolltap.errors import ConfigError
from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.continuation.tool_formats import FAMILY_FORMATS
from rolltap.tokenizer import HubTokenizer

from .making import family_renderer
from .malformed import FORMATS, TOOLS, Generator, faults, make

CASES = 150
"""Number of cases a format."""


THINK_IN_TAGS = [name for name in FORMATS if name not in ("gpt-oss", "inkling")]
IN_ONE_TEXT = (
    "llama-3",
    "a Llama template",
    "a pythonic template",
    "Mistral's list",
    "Mistral's arguments",
    "deepseek-v4",
)
IN_TOKENS = [name for name in THINK_IN_TAGS if name not in IN_ONE_TEXT]
"""The formats whose blocks have a token at each end."""


@pytest.mark.parametrize("name", FORMATS)
def test_no_malformed_call_is_served_unmarked(name: str, tmp_path: Path) -> None:
    form = make(name, tmp_path)
    assert [(why, case.alteration) for case, why in faults(form, CASES, random.Random("calls"))] == []


@pytest.mark.parametrize("name", THINK_IN_TAGS)
def test_a_call_in_thinking_is_part_of_it(name: str, tmp_path: Path) -> None:
    """In the thinking that the reply opens, or the prompt."""
    form = make(name, tmp_path)
    generator, renderer = Generator(form, random.Random("thinking")), form.renderer
    markers, encode = renderer.markers, renderer.tokenizer.encode
    assert markers.reasoning_open is not None
    for prompt in ((), (markers.reasoning_open,)):
        _, block = generator.call_and_ids()
        opening = [] if prompt else [markers.reasoning_open]
        ids = [*opening, *encode("hm "), *block, *encode(" no"), markers.reasoning_close, *encode("\n\nDone.\n")]
        parsed = renderer.parse(ids, prompt, TOOLS)
        assert (parsed.tool_calls, parsed.text) == ((), "Done.\n")
        assert parsed.reasoning == f"hm {renderer.tokenizer.decode(block)} no"
        parser = ReplyParser(renderer, prompt, TOOLS, (), lambda at: f"id{at}")
        for token in ids:
            parser.feed([token])
        _, choice = parser.finish("stop")
        assert (choice.message.tool_calls, choice.message.text) == ((), "Done.\n")
        assert choice.message.reasoning == parsed.reasoning


@pytest.mark.parametrize("name", IN_TOKENS)
def test_text_around_calls_is_as_sampled(name: str, tmp_path: Path) -> None:
    form = make(name, tmp_path)
    generator, renderer = Generator(form, random.Random("text")), form.renderer
    encode = renderer.tokenizer.encode
    (_, block), (_, other) = generator.call_and_ids(), generator.call_and_ids()
    broken = block[:-3] + block[-1:]
    ids = [*encode("  Look:  \n\n"), *block, *encode("\n"), *other, *encode("\n  so \n")]
    parsed = renderer.parse(ids, (), TOOLS)
    assert (parsed.text, len(parsed.tool_calls)) == ("  Look:  \n  so \n", 2)
    ids = [*encode("  Look:  \n\n"), *broken, *encode("\n so \n"), *block]
    parsed = renderer.parse(ids, (), TOOLS)
    if not all(call.begun or call.ok for call in parsed.tool_calls):
        assert parsed.text == f"  Look:  \n\n{renderer.tokenizer.decode(broken)}\n so "


def test_every_family_of_the_package_is_read() -> None:
    assert {*MODEL_RENDERER_MAP.values()} - {"default"} <= FAMILY_FORMATS.keys()


def test_another_family_is_refused_by_name(tokenizer: HubTokenizer) -> None:
    with pytest.raises(ConfigError, match="does not read the replies of renderer family 'custom'; known: qwen3, "):
        FamilyRenderer("custom", tokenizer)


@pytest.mark.parametrize("family", [name for name in FAMILY_FORMATS if name != "gpt-oss"])
def test_a_family_reads_the_calls_that_it_writes(tmp_path: Path, family: str) -> None:
    """gpt-oss has an encoder with a vocabulary of its own; its template stands in `FORMATS`."""
    renderer = family_renderer(tmp_path, family, *(['<|"|>'] if family == "gemma4" else []))
    prompt = renderer.render([Message("user", (Text("q"),))], TOOLS, thinking=True)
    name, arguments = "write_file", {"path": " a.py", "content": "\n    if x:\n        <b>é</b>\n\n", "count": 3}
    form = type(make("qwen3", tmp_path / "other"))(renderer)
    parsed = renderer.parse(form.render([(name, arguments)]), prompt[:0], TOOLS)
    assert [(call.name, json.loads(call.arguments), call.ok) for call in parsed.tool_calls] == [(name, arguments, True)]
