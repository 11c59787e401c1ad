"""Values that are bare text between tags: the text is the model's, its type the schema's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolltap.protocols.conversation import Tool
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.proxy.continuation.typed_values import Parameters

from .making import family_renderer, tokenizer_with, trl_template
from .malformed import FORMATS, TOOLS, make, served

PROPERTY = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXT = st.text(st.sampled_from("ab \n\t\r'\"\\é☕{}[],:=()#&\u00a0\u2028"), max_size=30) | st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\x00\ufdd0\ufdd1"), max_size=20
)
TAGS = st.sampled_from(
    ["<b>", "</b>", "</parameter>", "<parameter=x>", "<tool_call>", "</arg_value>", '<|"|>', "<|im_end|>"]
)
TAGGED = st.lists(TEXT | TAGS, max_size=5).map("".join)


@pytest.fixture(scope="module", params=FORMATS)
def form(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make(request.param, tmp_path_factory.mktemp("form"))


def writes(form: Any, text: str) -> bool:
    """Whether the template writes any text so that it can be told from its notation (LFM2.5's escapes nothing)."""
    renderer = form.renderer
    return getattr(renderer, "tool_format", "") != "lfm2-unescaped" or not {"'", '"', "\\"} & {*text}


@PROPERTY
@given(text=TEXT)
def test_a_text_is_read_as_it_was_rendered(form: Any, text: str) -> None:
    calls = [("write_file", {"content": text, "path": "a.py"})]
    parsed = form.renderer.parse(form.render(calls), (), TOOLS)
    assert served(parsed) == calls or not writes(form, text)


@PROPERTY
@given(text=TAGGED, other=TAGGED)
def test_a_text_with_tags_is_read_as_it_was_rendered_or_not_at_all(form: Any, text: str, other: str) -> None:
    calls = [("write_file", {"content": text, "path": other})]
    assert served(form.renderer.parse(form.render(calls), (), TOOLS)) in (calls, None) or not writes(form, text + other)


@pytest.fixture(scope="module", params=["family", "template"])
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen")
    if request.param == "family":
        return family_renderer(folder, "qwen3.5")
    return TemplateRenderer(tokenizer_with(folder, trl_template("qwen3_5_think")))


def read(renderer: Any, block: str, tools: tuple[Tool, ...] = TOOLS) -> tuple[list[Any], str, bool]:
    """The calls, the text and whether the reply is marked."""
    parser = ReplyParser(renderer, [], tools, (), lambda at: f"id{at}")
    for token in renderer.tokenizer.encode(f"<tool_call>{block}</tool_call>"):
        parser.feed([token])
    _, choice = parser.finish("stop")
    calls = [(call.name, json.loads(call.arguments)) for call in choice.message.tool_calls]
    return calls, choice.message.text, parser.unparsable


def test_one_line_break_at_each_end_belongs_to_the_format(qwen: Any) -> None:
    value = "    if x:\n        return 1\n"
    block = f"\n<function=write_file>\n<parameter=content>\n{value}\n</parameter>\n</function>\n"
    assert read(qwen, block) == ([("write_file", {"content": value})], "", False)


@pytest.mark.parametrize(
    "body",
    [
        "<parameter=path>\na.py\n<parameter=content>\nhello\n</parameter>\n",
        "<parameter=path>\na.py<parameter=content>\nhello\n</parameter>\n",
        "<parameter=path>\na.py\n</parameter>\n</parameter>\n",
        "<parameter=path>\na.py\n</parameter>\n<parameter=path>\nb.py\n</parameter>\n",
        "<parameter=path>\na.py\n</parameter>\nand more\n",
        "<parameter=path>\na.py\n</parameter>\n</function>\n<function=bash>\n",
        '{"path": "a.py"}\n',
        "<parameter=count>\ntwelve\n</parameter>\n",
    ],
)
def test_a_block_that_is_not_used_up_is_text(qwen: Any, body: str) -> None:
    block = f"\n<function=write_file>\n{body}</function>\n"
    assert read(qwen, block) == ([], f"<tool_call>{block}</tool_call>", True)


@pytest.mark.parametrize(
    "value",
    [
        '<parameters>\n  <parameter name="a">1</parameter>\n</parameters>',
        '<parameter name="a">1</parameter>',
        "grep -n '</parameter>' a.xml",
        "std::function<void()> f;",
        "<tool_call> and </tool_call>",
    ],
)
def test_other_tags_in_a_value_are_text(qwen: Any, value: str) -> None:
    guarded = qwen.tokenizer.guard(value)
    block = f"\n<function=write_file>\n<parameter=content>\n{guarded}\n</parameter>\n</function>\n"
    assert read(qwen, block) == ([("write_file", {"content": value})], "", False)


@pytest.mark.parametrize(
    "layout",
    [
        "<function=bash><parameter=command>ls</parameter></function>",
        "\n<function=bash>\n\n<parameter=command>\nls</parameter>\n\n</function>",
    ],
)
def test_line_breaks_between_tags_may_be_missing_or_more(qwen: Any, layout: str) -> None:
    assert read(qwen, layout) == ([("bash", {"command": "ls"})], "", False)


STRING, INTEGER, NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
UNFIT = object()


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "123", "123"),
        (STRING, "null", "null"),
        ({"anyOf": [STRING, NULL]}, "123", "123"),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"anyOf": [STRING, NULL]}, "None", None),
        ({"anyOf": [STRING, NULL]}, " null", " null"),
        ({"type": ["string", "null"]}, "123", "123"),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"oneOf": [STRING, INTEGER]}, "123", 123),
        ({"oneOf": [STRING, INTEGER]}, "12a", "12a"),
        ({"oneOf": [STRING, INTEGER]}, " 12", " 12"),
        ({"anyOf": [STRING, {"type": "array"}]}, '["a"]', ["a"]),
        ({"anyOf": [STRING, {"type": "array"}]}, "[a", "[a"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "yes", UNFIT),
        ({"type": "boolean"}, "1", UNFIT),
        (INTEGER, " 5 ", 5),
        (INTEGER, "5.0", 5.0),
        (INTEGER, "5.5", UNFIT),
        (INTEGER, "", UNFIT),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", UNFIT),
        (NULL, "None", None),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": "STRING"}, "1", "1"),
        ({"type": "object"}, '{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"type": "object"}, "[]", UNFIT),
        ({"type": "array", "items": STRING}, "['a']", ["a"]),
        ({"type": "array", "items": STRING}, "['a", UNFIT),
        ({"properties": {"a": INTEGER}}, '{"a": 1}', {"a": 1}),
        ({"$ref": "#/$defs/Name"}, "12", "12"),
        ({"$ref": "#/$defs/Level"}, "3", 3),
        ({"$ref": "#/$defs/Level"}, "high", "high"),
        ({"$ref": "#/$defs/Loop"}, "7", 7),
        ({"allOf": [{"$ref": "#/$defs/Name"}], "description": "a name"}, "12", "12"),
        ({"allOf": [{"type": "number"}, INTEGER]}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", "2", None]}, "null", None),
        ({"enum": ["None", "all", None]}, "None", "None"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1, 2]}, "one", UNFIT),
        ({"const": "12"}, "12", "12"),
        ({"const": True}, "True", True),
        ({"const": 5}, "5", 5),
        ({}, "12", 12),
        ({}, "text", "text"),
        (True, "12", 12),
        ({"anyOf": [{}, STRING]}, '{"a": 1}', {"a": 1}),
    ],
)
def test_a_value_has_its_declared_type(schema: Any, text: str, value: Any) -> None:
    definitions = {
        "Name": STRING,
        "Level": {"anyOf": [{"$ref": "#/$defs/Name"}, INTEGER]},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, INTEGER], "allOf": [{"$ref": "#/$defs/Loop"}]},
    }
    tool = Tool("t", "", {"type": "object", "properties": {"x": schema}, "$defs": definitions})
    read = Parameters("t", [tool]).read("x", text)
    assert (UNFIT if read is None else json.loads(read)) == value
    assert read is None or type(json.loads(read)) is type(value)


def test_a_parameter_that_is_not_declared_follows_the_rest_of_the_schema() -> None:
    def read(schema: Any, text: str) -> Any:
        return json.loads(Parameters("t", [Tool("t", "", schema)]).read("x", text) or '"unfit"')

    assert read({"type": "object", "additionalProperties": STRING}, "12") == "12"
    assert read({"type": "object", "properties": {}}, "12") == 12
    assert read(None, "text") == "text"
    assert read({"$ref": "#/$defs/T", "$defs": {"T": {"properties": {"x": STRING}}}}, "12") == "12"


def test_a_schema_that_refers_to_itself_many_times_is_read_at_once() -> None:
    """A client makes it: each level would double the work."""
    levels = {f"L{at}": {"anyOf": [{"$ref": f"#/$defs/L{at + 1}"}] * 2} for at in range(60)}
    schema = {"properties": {"x": {"$ref": "#/$defs/L0"}}, "$defs": {**levels, "L60": INTEGER}}
    assert Parameters("t", [Tool("t", "", schema)]).read("x", "12") == "12"


def test_every_line_of_a_custom_tools_text_is_kept(qwen: Any) -> None:
    text = "\n  print(1)\n\n12"
    block = f"\n<function=exec>\n<parameter=input>\n{text}\n</parameter>\n</function>\n"
    tool = Tool("exec", "", None, "custom")
    parser = ReplyParser(qwen, [], (tool,), (), lambda at: f"id{at}")
    parser.feed(qwen.tokenizer.encode(f"<tool_call>{block}</tool_call>"))
    _, choice = parser.finish("stop")
    assert [call.arguments for call in choice.message.tool_calls] == [text]


@pytest.mark.parametrize(
    "block",
    [
        '{"name": "bash", "parameters": {"command": "ls"}}',
        '{"name": "bash", "arguments": null}',
        '{"name": "bash"}',
        '{"arguments": {"command": "ls"}, "name": "bash", "id": 1}',
        '{"name": "ba\\nsh", "arguments": {"command": "ls"}}',
        '{"arguments": {"a": 1, "a": 2}, "name": "bash"}',
        '{"name": "bash", "arguments": "ls"}',
    ],
)
def test_a_hermes_block_with_other_members_is_text(either: Any, block: str) -> None:
    assert read(either, block) == ([], f"<tool_call>{block}</tool_call>", True)


@pytest.mark.parametrize(
    "block",
    [
        '{"arguments": {"command": "ls"}, "name": "bash"}',
        '{"name": "bash", "arguments": "{\\"command\\": \\"ls\\"}"}',
        '\n\t{ "name" : "bash" ,\n"arguments":{"command":"ls"}}\n',
    ],
)
def test_a_hermes_block_in_another_lawful_spelling_is_read(either: Any, block: str) -> None:
    assert read(either, block) == ([("bash", {"command": "ls"})], "", False)


@pytest.mark.parametrize("arguments", ['{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 2}}'])
def test_arguments_that_repeat_a_key_are_served_as_sampled_and_marked(either: Any, arguments: str) -> None:
    parser = ReplyParser(either, [], TOOLS, (), lambda at: f"id{at}")
    parser.feed(either.tokenizer.encode(f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'))
    _, choice = parser.finish("stop")
    assert [call.arguments for call in choice.message.tool_calls] == [arguments]
    assert parser.unparsable


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@PROPERTY
@given(value=st.lists(JSON_VALUES, max_size=3) | st.dictionaries(TEXT, JSON_VALUES, max_size=3))
def test_a_list_or_an_object_may_be_written_as_python_does(value: Any) -> None:
    """Seed-OSS' template does, and so do models that were taught by it."""
    kind = {"type": "array" if isinstance(value, list) else "object"}
    parameters = Parameters("f", (Tool("f", "", {"type": "object", "properties": {"x": kind}}),))
    for written in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        read = parameters.read("x", written)
        assert read is not None
        assert json.loads(read) == value


@pytest.mark.parametrize("text", ["['a' 'b']", "['a', b]", "[(1, 2)]", "{'a'}", "['a'", "[f'a']", "[1, -]", "['\\d']"])
def test_other_python_is_no_value(text: str) -> None:
    assert Parameters("f", (Tool("f", "", {"properties": {"x": {"type": "array"}}}),)).read("x", text) is None
