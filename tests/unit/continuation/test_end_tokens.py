"""All tokens that end a model's reply are stop tokens, and none is text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolltap.errors import ConfigError
from rolltap.protocols.conversation import Message, Text
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.proxy.continuation.rendering import FamilyRenderer
from rolltap.proxy.continuation.template import TemplateRenderer
from rolltap.tokenizer import HubTokenizer

from .conftest import BASH
from .making import family_renderer, tokenizer_with, trl_template

ENDS = ("<|stop|>", "<|other_stop|>")


def folder_with(folder: Path, end: Any) -> Path:
    tokenizer_with(folder, trl_template("qwen3"), *ENDS)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


@pytest.mark.parametrize("kind", ["family", "template"])
@pytest.mark.parametrize("listed", [True, False])
def test_the_ends_of_the_generation_config_stop_a_reply(tmp_path: Path, kind: str, listed: bool) -> None:
    made = tokenizer_with(tmp_path, "", *ENDS)
    ids = [made.convert_tokens_to_ids(end) for end in ENDS][: 2 if listed else 1]
    tokenizer = HubTokenizer(folder_with(tmp_path, ids if listed else ids[0]))
    renderer = FamilyRenderer("qwen3", tokenizer) if kind == "family" else TemplateRenderer(tokenizer)
    own = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert {own, *ids} <= {*renderer.stop_token_ids}
    for end in (own, *ids):
        parser = ReplyParser(renderer, [], (BASH,), (), lambda at: f"id{at}")
        parser.feed([*tokenizer.encode("ok"), end])
        _, choice = parser.finish("stop")
        assert choice.message.text == renderer.parse([*tokenizer.encode("ok"), end], (), ()).text == "ok"


def test_without_the_file_the_family_knows_its_ends(tmp_path: Path) -> None:
    renderer = family_renderer(tmp_path, "glm-4.5")
    names = {renderer.tokenizer.token(end) for end in renderer.stop_token_ids}
    assert names == {"<|endoftext|>", "<|user|>", "<|observation|>"}


@pytest.mark.parametrize("end", [151645, [151645, -1]])
def test_an_end_that_the_tokenizer_has_not_ends_nothing(tmp_path: Path, end: Any) -> None:
    """As of a model's configuration that was made for another vocabulary. Turns go on behind the real end."""
    tokenizer = HubTokenizer(folder_with(tmp_path, end))
    assert tokenizer.end_token_ids == ()
    renderer, own = TemplateRenderer(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    new = [Message("user", (Text("And now?"),))]
    assert renderer.bridge([1, 2], [*tokenizer.encode("ok"), own], new, (), thinking=False) is not None


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, None)
    assert HubTokenizer(folder).end_token_ids == ()
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        HubTokenizer(folder)
