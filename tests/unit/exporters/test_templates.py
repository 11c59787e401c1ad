"""Every chat template that TRL ships renders what our files hold as it renders the record, in every message format."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from jinja2 import TemplateError, UndefinedError
from transformers.utils.chat_template_utils import render_jinja_template
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import remove_none_values

from rolltap.reconstructor.exporters import exporter_named
from rolltap.reconstructor.exporters.base import ExportItem
from rolltap.reconstructor.exporters.conversation import MessageForm, conversations
from rolltap.reconstructor.exporters.dataset import DatasetWriter, Query

from ...bench.fidelity.families import FAMILIES, MATRIX
from .world import World, says, system, tool, user

FORMATS = {
    "sft": ["messages"],
    "sft targets=whole": ["messages"],
    "sft targets=split": ["prompt", "prompt completion"],
    "preference": ["prompt chosen", "prompt rejected"],
    "kto": ["prompt completion"],
}
"""Format with its option → the columns that a trainer renders together."""


def templates() -> dict[str, str]:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


TEMPLATES = templates()
NEEDS_TEXT = {"deepseekv3"}
"""Templates that take arguments as a text only: `--option arguments=text`."""

OF_PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates of processors of images, whose trainers make parts of every content."""

OWN_RULES = {"cohere", "cohere2", "gemma", "gemma3", "llava_next"}
"""Templates that refuse conversations with a system message or a tool's answer, whatever form these have."""


@pytest.fixture(scope="module")
def items(world: World) -> list[ExportItem]:
    """Two rollouts, calls of two tools, one of them without arguments; in one of them words beside a call."""
    made = []
    for number in range(2):
        script = world.script(f"s{number}")
        arguments = {"command": "grep -c 'ä' <a.txt", "timeout": 3, "env": {"LANG": "C"}, "flags": ["-x", None]}
        first = says("I look." * number, ("c1", "bash", arguments), reasoning="what is there?")
        history = [system("You are an agent."), user("Make the file.")]
        parent = script.ask(history, first)
        history = [*history, first, tool("c1", "0")]
        second = says("", ("c2", "read", {"path": f"{number}.txt"}), reasoning="and this?")
        parent = script.ask(history, second, parent=parent)
        history = [*history, second, tool("c2", "日本 🙂"), user("Go on.")]
        third = says("", ("c3", "read", {}))
        parent = script.ask(history, third, parent=parent)
        history = [*history, third, tool("c3", "nothing")]
        script.ask(history, says(f"Done {number}.", reasoning="all there"), parent=parent)
        made.append(script.item(reward=float(number), task="t", group="g"))
    return made


_RENDERED: dict[str, str | None] = {}


def rendered(name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str | None:
    """The text; None where the template itself refuses such conversations. Any other error is raised.

    What is equal is rendered once: the forms and containers have many conversations in common.
    """
    key = repr((name, messages, tools))
    if key not in _RENDERED:
        _RENDERED[key] = render(name, messages, tools)
    return _RENDERED[key]


def render(name: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> str | None:
    plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    if name.removesuffix("_training") in OF_PARTS:
        plain = prepare_multimodal_messages(plain, images=[])
    try:
        texts, _ = render_jinja_template(
            [plain], tools=list(tools), chat_template=TEMPLATES[name], bos_token="", eos_token=""
        )
    except UndefinedError:
        raise
    except TemplateError:
        return None
    return texts[0]


def loaded(out: Path, format: str, container: Any, arguments: str, items: list[ExportItem]) -> list[dict[str, Any]]:
    """The rows as TRL's trainers get them."""
    name, _, option = format.partition(" ")
    exporter = exporter_named(name, {"arguments": arguments, **(dict([option.split("=")]) if option else {})})
    with DatasetWriter(out, exporter, Query(container=container)) as writer:
        writer.add(items)
        files = [str(out / file["path"]) for file in writer.finish()["files"]]
    kind = "parquet" if container == "parquet" else "json"
    data: Any = load_dataset(kind, data_files=files, split="train", cache_dir=str(out.parent / "cache"))
    return list(data.with_transform(remove_none_values))


def test_the_families_of_the_fidelity_matrix_are_among_the_templates() -> None:
    assert len(FAMILIES) == 13
    templates = {template for family in FAMILIES if (template := MATRIX[family.matrix].template)}
    assert len(templates) == 6
    assert templates <= set(TEMPLATES)
    assert len(TEMPLATES) >= 70


@pytest.mark.parametrize("container", ["jsonl", "parquet"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_template_renders_the_file_as_it_renders_the_record(
    format: str, container: str, items: list[ExportItem], tmp_path: Path
) -> None:
    rows = {form: loaded(tmp_path / form, format, container, form, items) for form in ("object", "text")}
    whole = [next(iter(conversations(item))) for item in items]
    rendering = set()
    for name in TEMPLATES:
        form = "text" if name in NEEDS_TEXT else "object"
        assert rows[form]
        for row in rows[form]:
            tools = json.loads(row["tools"])
            for columns in FORMATS[format]:
                messages = [message for column in columns.split() for message in row[column]]
                recorded = [each.messages(MessageForm(arguments=form))[: len(messages)] for each in whole]
                text = rendered(name, messages, tools)
                assert text in [rendered(name, each, whole[0].tools) for each in recorded], name
                if text is not None and any(message["role"] == "tool" for message in messages):
                    rendering.add(name.removesuffix("_training"))
    # cohere2 takes a conversation up to its first tool's answer, which is how the first of the split rows begins.
    refusing = OWN_RULES - {"cohere2"} if "split" in format else OWN_RULES
    assert {name.removesuffix("_training") for name in TEMPLATES} - rendering == refusing
