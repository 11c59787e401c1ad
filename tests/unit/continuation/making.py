"""Model folders that hold the tiny model's vocabulary and another family's chat template and special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError
from rolltap.protocols.conversation import Choice
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.tokenizer import HubTokenizer

LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
GLM = ("<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM_PROMPT = ("[gMASK]", "<sop>", "<|system|>", "<|endoftext|>")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GEMMA4 = ("<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>")
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
GEMMA = ("<start_of_turn>", "<end_of_turn>")
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")

TURNS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}CALLS{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
EACH = "{% if not loop.last %}, {% endif %}{% endfor %}"
PYTHONIC = TURNS.replace(
    "CALLS",
    "[{% for c in m.tool_calls %}{{ c.function.name }}({% for key, value in c.function.arguments.items() %}"
    "{{ key }}={{ value | tojson }}" + EACH + ")" + EACH + "]",
)
"""Calls as Gemma 3's and Llama 4's templates for tools write them."""

CALLED_WITH_ESCAPES = (
    "{% macro show(value) %}{% if value is string %}<escape>{{ value }}<escape>{% elif value is mapping %}"
    "{{ '{' }}{% for key, inner in value.items() %}{{ key }}:{{ show(inner) }}" + EACH.replace(", ", ",") + "}"
    "{% elif value is sequence %}[{% for inner in value %}{{ show(inner) }}" + EACH.replace(", ", ",") + "]"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
) + TURNS.replace(
    "CALLS",
    "{% for c in m.tool_calls %}<start_function_call>call:{{ c.function.name }}{{ show(c.function.arguments) }}"
    "<end_function_call>{% endfor %}",
)
"""Calls as FunctionGemma's template writes them."""

MISTRAL = """{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
    {%- if version == 'list' %}{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}
        {{- call.function | tojson }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']</s>' }}
    {%- else %}{%- for call in message.tool_calls %}
        {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}{%- endfor %}
        {{- '</s>' }}
    {%- endif %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + '</s>' }}{%- endif %}{%- endfor %}"""
"""The forms of Mistral's templates. `version` is set by `mistral`."""


def mistral(version: str) -> str:
    """A template in which a turn's calls are a JSON "list", or each has its name and "args"."""
    return f"{{%- set version = '{version}' %}}{MISTRAL}"


def tokenizer_with(folder: Path, template: str, *special: str, **config: str) -> HubTokenizer:
    """A tokenizer whose vocabulary has the `special` tokens too; `config` stands over that of its folder."""
    spec = json.loads((FOLDER / "tokenizer.json").read_text())
    size = 1 + max(token["id"] for token in spec["added_tokens"])
    like = spec["added_tokens"][0]
    spec["added_tokens"] += [{**like, "id": size + at, "content": token} for at, token in enumerate(special)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    own = json.loads((FOLDER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, **config}))
    (folder / "chat_template.jinja").write_text(template)
    return HubTokenizer(folder)


def trl_template(name: str) -> str:
    """A chat template that the `trl` package ships."""
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def fed(reader: ReplyParser, ids: Sequence[int], sizes: Sequence[int], finish: Any) -> tuple[list[Any], Choice]:
    """The events and the reply of `ids` that come in chunks of `sizes`, the last size first, and then singly."""
    events: list[Any] = []
    left, rest = list(sizes), list(ids)
    while rest and reader.stopped is None:
        size = left.pop() if left else 1
        events += reader.feed(rest[:size])
        rest = rest[size:]
    last, choice = reader.finish(finish)
    return [*events, *last], choice


def llama_renderer(folder: Path) -> TemplateRenderer:
    """Llama 3.1's template, whose calls are plain text."""
    special = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
    return TemplateRenderer(tokenizer_with(folder, trl_template("llama3_1"), *LLAMA, **special))


def glm_family(folder: Path, family: str = "glm-4.5") -> FamilyRenderer:
    """A GLM family, whose prompts leave it to the reply to open thinking (4.5) or open it (5)."""
    return FamilyRenderer(family, tokenizer_with(folder, trl_template("glm4moe"), *GLM, *GLM_PROMPT))


def mistral_renderer(folder: Path, version: str) -> TemplateRenderer:
    return TemplateRenderer(tokenizer_with(folder, mistral(version), "[TOOL_CALLS]", "[ARGS]", "</s>"))


_ASKED: dict[tuple[str, ...], list[str]] = {}
"""The special tokens that a family, with more of them, was found to ask for."""


def family_renderer(folder: Path, family: str, *more: str) -> FamilyRenderer:
    """Any family, over the tiny model's vocabulary and the special tokens that the family asks for, and `more`."""
    special = _ASKED.setdefault((family, *more), [*more])
    while True:
        try:
            return FamilyRenderer(family, tokenizer_with(folder, "", *special))
        except ConfigError as error:
            asked = re.search(r"(?:token|for) '([^']+)'", str(error).partition(f"{family!r}: ")[2])
            if asked is None or asked[1] in special:
                raise
            special.append(asked[1])
