"""The faults for which rolltap reads replies itself. One that the `renderers` package has mended fails here: then look
whether its parser can be used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolltap.protocols.conversation import Tool

from .making import family_renderer

MAYBE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
SCHEMA = {"type": "object", "properties": {"content": {"type": "string"}, "maybe": MAYBE, "flag": {"type": "boolean"}}}
TOOLS = (Tool("bash", "", SCHEMA),)
QWEN = "<tool_call>\n<function=bash>\n{}</function>\n</tool_call>"
PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
GLM = "<tool_call>bash\n{}</tool_call>"
PAIR = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
MINIMAX = '<minimax:tool_call>\n<invoke name="bash">\n{}</invoke>\n</minimax:tool_call>'


@pytest.mark.parametrize(
    ("family", "block", "faulty"),
    [
        ("qwen3", '<tool_call>{"name": "bash", "parameters": {"content": "a"}}</tool_call>', {}),
        (
            "qwen3",
            '<tool_call>{"name": "bash", "arguments": {"content": "a"}, "content": "b"}</tool_call>',
            {"content": "a"},
        ),
        ("qwen3.5", QWEN.format(PARAMETER.format("content", "  a  ")), {"content": "a"}),
        ("qwen3.5", QWEN.format("<parameter=x>\na\n" + PARAMETER.format("y", "b")), {"x": "a\n<parameter=y>\nb"}),
        ("qwen3.5", QWEN.format(PARAMETER.format("x", "a") * 2), {"x": "a"}),
        ("qwen3.5", QWEN.format(PARAMETER.format("x", "a") + "and more\n"), {"x": "a"}),
        ("qwen3.5", QWEN.format('{"content": "a"}\n'), {}),
        ("qwen3.5", QWEN.format(PARAMETER.format("maybe", "123")), {"maybe": 123}),
        ("qwen3.5", QWEN.format(PARAMETER.format("flag", "True")), {"flag": "True"}),
        ("glm-4.5", GLM.format(PAIR.format("content", "  a  ")), {"content": "a"}),
        ("glm-4.5", GLM.format(PAIR.format("content", "a") + "and more\n"), {"content": "a"}),
        (
            "laguna-xs.2",
            GLM.format("<arg_key>x</arg_key>\n" + PAIR.format("content", "a")),
            {"x</arg_key>\n<arg_key>content": "a"},
        ),
        ("hy3", None, {"content": "a"}),
        (
            "minimax-m2",
            MINIMAX.format('<parameter name="x">a\n<parameter name="y">b</parameter>\n'),
            {"x": 'a\n<parameter name="y">b'},
        ),
        ("llama-3", '{"name": "bash", "arguments": {"content": "a"}, "more": 1}', {"content": "a"}),
    ],
)
def test_the_package_takes_a_part_of_a_block_for_a_call(
    tmp_path: Path, family: str, block: str | None, faulty: dict[str, Any]
) -> None:
    renderer = family_renderer(tmp_path, family)
    if block is None:  # the package strips here, too
        tag = "<{}:opensource>".format
        pair = f"{tag('arg_key')}content{tag('/arg_key')}\n{tag('arg_value')} a {tag('/arg_value')}\n"
        call = f"{tag('tool_call')}bash{tag('tool_sep')}\n{pair}{tag('/tool_call')}\n"
        block = f"{tag('tool_calls')}\n{call}{tag('/tool_calls')}"
    ids = renderer.tokenizer.encode(block)
    package = renderer._by_thinking[False]
    specs = renderer._declared(TOOLS).specs
    assert [call.arguments for call in package.parse_response(ids, tools=specs).tool_calls] == [faulty]
    calls = renderer.parse(ids, (), TOOLS).tool_calls
    assert [call.arguments for call in calls if call.ok] != [faulty]
