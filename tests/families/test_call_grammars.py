"""The grammar of each family's calls: whatever it lets through is read as a call that keeps to the tool's schema."""

from __future__ import annotations

import json
import random

import pytest

from rolltap.engine.grammar import Grammars
from rolltap.protocols.conversation import Message, Text, Tool
from rolltap.proxy.continuation.parser import ReplyParser
from rolltap.token_masks import ids_of_words

from ..schemas import check, schema
from .families import FAMILIES
from .fitting_table import renderer_of
from .test_fitting import HANDLES, QUICK, continuation_of
from .vocabularies import model_folder

JSON = {
    *("qwen3", "qwen3-vl", "qwen2_5 (template)", "qwen3 (template)", "qwen3_instruct_2507 (template)"),
    *("qwen3_vl (template)", "deepseek-r1", "deepseek-v3", "deepseekv3 (template)", "kimi-k2", "kimi-k2.5"),
    *("mistral_v3 (template)", "mistral_v7 (template)", "devstral (template)"),
}
"""The families whose calls have JSON arguments, and a token that opens a call."""
JSON_WITHOUT_OPENING = {"llama-3", "llama3_1 (template)", "llama3_2 (template)"}
NAMES = [name for name in QUICK if FAMILIES[name].tools]
SAMPLES = 6


def tools_of(rng: random.Random) -> list[Tool]:
    return [Tool(name, f"Does {name}.", schema(rng)) for name in ("look", "lookup", "walk")]


@pytest.mark.parametrize("name", NAMES, scope="module")
@pytest.mark.parametrize("must_call", [True, pytest.param(False, marks=pytest.mark.families)])
def test_what_a_grammar_lets_through_is_read_as_such_a_call(name: str, must_call: bool) -> None:
    family = FAMILIES[name]
    renderer, rng = renderer_of(family), random.Random(name)
    continuation = continuation_of(renderer)
    tools = tools_of(rng)
    grammar = continuation.call_grammars.find(tools, must_call=must_call)
    if grammar is None:
        return
    path = model_folder(family, "tiny") / "tokenizer.json"
    vocabulary = max(json.loads(path.read_text())["model"]["vocab"].values()) + 400
    grammars, ends = Grammars(path, vocabulary), frozenset(renderer.stop_token_ids)
    matcher = grammars.compile(grammar)
    prompt = renderer.render([Message("user", (Text("go"),))], tools, thinking=False)
    called = 0
    for _ in range(SAMPLES):
        state, ids = grammars.start(matcher, ends, None), []
        while not ids or ids[-1] not in ends:
            words = state.words()
            assert words is not None
            allowed = ids_of_words(words)
            opening = renderer.markers.tool_open
            preferred = [token for token in allowed if token in ends or token == opening]
            ids.append(int(rng.choice(preferred if preferred and rng.random() < 0.3 else list(allowed))))
            state.take(ids[-1])
            assert len(ids) < 2000
        parser = ReplyParser(renderer, prompt, tools, (), lambda at: HANDLES.mint("call", at))
        parser.feed(ids)
        _, choice = parser.finish("stop")
        assert not parser.unparsable
        calls = choice.message.tool_calls
        assert len(calls) == 1 or (not must_call and not calls)
        for call in calls:
            called += 1
            check(call.arguments, next(tool.parameters for tool in tools if tool.name == call.name) or {})
    assert called


def test_a_grammar_is_made_once_and_not_for_free_text() -> None:
    grammars = continuation_of(renderer_of(FAMILIES["qwen3"])).call_grammars
    tools = tools_of(random.Random(1))
    assert grammars.find(tools, 1) is grammars.find(tools, 2)
    assert grammars.find(tools[:1]) != grammars.find(tools)
    assert grammars.find([Tool("free", "", None, "custom")]) is None
