"""Tools as harnesses declare them: no family refuses a call for the schema of a tool."""

from __future__ import annotations

from typing import Any

import pytest

from rolltap.protocols.conversation import Message, Text, Tool
from rolltap.tokenizer import HubTokenizer

from .families import FAMILIES, HARMONY
from .fitting_table import renderer_of
from .vocabularies import model_folder

TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any value": {"description": "Any JSON value."},
    "empty": {},
    "boolean": True,  # type: ignore[dict-item]
    "oneOf": {"oneOf": [TEXT, {"type": "integer"}], "description": "One of two."},
    "anyOf": {"anyOf": [TEXT, {"type": "null"}], "default": None},
    "allOf": {"allOf": [{"$ref": "#/$defs/part"}]},
    "$ref": {"$ref": "#/$defs/part"},
    "type list": {"type": ["string", "null"]},
    "enum": {"enum": ["a", 1, None, True]},
    "const": {"const": "fixed"},
    "array": {"type": "array"},
    "array of any": {"type": "array", "items": {}},
    "tuple": {"type": "array", "prefixItems": [TEXT, {"type": "number"}]},
    "object": {"type": "object"},
    "map": {"type": "object", "additionalProperties": TEXT},
    "nested": {"type": "object", "properties": {"inner": {"type": "array", "items": {"type": "object"}}}},
    "pattern": {"type": "string", "pattern": '^["\\\\]+$', "minLength": 1, "format": "uri"},
}
"""Schemas of one parameter that pydantic, zod and vendors' tools write, by what is special about them."""

DEFINITIONS = {"$defs": {"part": {"type": "object", "properties": {"name": TEXT}, "required": ["name"]}}}
NO_PARAMETERS = (Tool("look", "Looks.", {}), Tool("look", "", {"type": "object"}), Tool("look", "", None))


def tool(schema: Any) -> Tool:
    parameters = {"type": "object", "properties": {"value": schema}, "required": ["value"], **DEFINITIONS}
    return Tool(
        "look", "Looks something up.", {"$schema": "https://json-schema.org/draft/2020-12/schema", **parameters}
    )


@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if family.tools and family.markup is not HARMONY]
)
def test_every_schema_is_declared(name: str) -> None:
    renderer, question = renderer_of(FAMILIES[name]), [Message("user", (Text("go"),))]
    plain = renderer.tokenizer.decode(renderer.render(question, (tool(TEXT),), thinking=True))
    declared = {what: (tool(schema),) for what, schema in SCHEMAS.items()} | {"no parameters": NO_PARAMETERS}
    texts = {
        what: renderer.tokenizer.decode(renderer.render(question, t, thinking=True)) for what, t in declared.items()
    }
    if "look" in plain:  # DeepSeek-V3's format declares no tools
        assert not [what for what, text in texts.items() if "look" not in text]


def test_kimi_declares_in_json_what_it_cannot_write_in_typescript() -> None:
    renderer, messages = renderer_of(FAMILIES["kimi-k2.5"]), [Message("user", (Text("go"),))]
    tools = (tool({"oneOf": [TEXT]}),)
    prompt = renderer.render(messages, tools, thinking=True)
    text = renderer.tokenizer.decode(prompt)
    assert text.startswith('<|im_system|>tool_declare<|im_middle|>[{"function":{"description":"Looks something up."')
    assert text.count("tool_declare") == 1
    output = renderer.tokenizer.encode("done<|im_end|>")
    turn, more = Message("assistant", (Text("done"),)), Message("user", (Text("more"),))
    bridged = renderer.bridge(prompt, output, [more], tools, thinking=True)
    assert bridged == renderer.splice(prompt, output, [*messages, turn, more], 2, tools, thinking=True)
    assert bridged is not None
    assert renderer.tokenizer.decode(bridged).count("tool_declare") == 1


def test_the_package_still_refuses_them() -> None:
    """When it does not, `FamilyRenderer` needs no other declarations."""
    import renderers

    for name, schema in (("kimi-k2.5", {"oneOf": [TEXT]}), ("nemotron-3", True)):
        tokenizer: Any = HubTokenizer(model_folder(FAMILIES[name], "tiny"))
        specs: Any = [{"type": "function", "function": {"name": "look", "parameters": tool(schema).parameters}}]
        renderer = renderers.create_renderer(tokenizer, renderers.config_from_name(name))
        with pytest.raises((ValueError, TypeError)):
            renderer.render_ids([{"role": "user", "content": "go"}], tools=specs)


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "kimi-k2.5", "nemotron-3", "laguna-s-2.1", "gemma4"])
def test_thinking_is_switched(name: str) -> None:
    assert renderer_of(FAMILIES[name]).switches_thinking
