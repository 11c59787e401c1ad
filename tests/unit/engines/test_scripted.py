"""The scripted engine: what a script says becomes tokens, and every prompt is checked for continuity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolltap.engine.scripted import (
    STUB,
    Journal,
    Prompt,
    ReplyFunction,
    Rule,
    Script,
    ScriptedEngine,
    ScriptedReply,
    ToolUse,
    load_script,
    say,
)
from rolltap.engine.scripted.writing import ScriptedReplyWriter
from rolltap.engine.tiny import FOLDER
from rolltap.errors import ConfigError

TOML = """
[[rules]]
when = "count the files"
[[rules.turns]]
think = "I should look."
call = [{ tool = "bash", arguments = { command = "ls | wc -l" } }]
[[rules.turns]]
say = "There are three."
fault = { kind = "cut", after = 2 }
"""

Post = Any


def text_of(writer: ScriptedReplyWriter, ids: list[int]) -> str:
    return writer.tokenizer.decode(ids)


# Scripts


def test_a_script_in_toml(tmp_path: Path):
    path = tmp_path / "script.toml"
    path.write_text(TOML)
    script = load_script(path)
    assert isinstance(script, Script)
    first, second = script.rules[0].turns
    assert first.call == (ToolUse("bash", {"command": "ls | wc -l"}),)
    assert second.fault is not None
    assert (second.fault.kind, second.fault.after, second.fault.times) == ("cut", 2, 1)


def test_a_script_in_python(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text("def reply(prompt):\n    return f'turn {prompt.turn}'\n")
    reply = load_script(path)
    assert not isinstance(reply, Script)
    assert reply(Prompt([], "", "", 3, "s", "m")) == "turn 3"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "[[rules]]\nturn = 3", "turn"),
        ("a.toml", "[[rules]]\nturns = [{ fault = { kind = 'explode' } }]", "explode"),
        ("a.toml", "not toml", "is not toml"),
        ("a.json", "{", "is not json"),
        ("a.json", "[]", "expected an object, got a list"),
        ("a.py", "x = 1", "neither SCRIPT nor a function"),
        ("a.py", "x =", "is not py"),
        ("a.yaml", "", "one of .toml, .json, .py"),
    ],
)
def test_a_script_that_can_not_be_read_says_why(tmp_path: Path, name: str, text: str, words: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_script(path)


def test_a_script_that_is_not_there():
    with pytest.raises(ConfigError, match="can't read"):
        load_script(Path("nowhere.toml"))


def test_unknown_wires_and_families_are_named():
    with pytest.raises(ConfigError, match=r"no wire 'tgi'; known: vllm"):
        ScriptedEngine(STUB, FOLDER, wire="tgi")
    with pytest.raises(ConfigError, match="nobody"):
        ScriptedEngine(STUB, FOLDER, family="nobody")
    with pytest.raises(ConfigError, match="can't be read"):
        ScriptedEngine(STUB, Path("nowhere"))


# Turns as tokens


def test_a_turn_is_what_the_family_samples(writer: ScriptedReplyWriter):
    turn = ScriptedReply(think="hm", say="look:", call=(ToolUse("bash", {"command": "ls"}),))
    assert text_of(writer, writer.write(turn, [])) == (
        "<think>\nhm\n</think>\n\nlook:\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    )


def test_what_the_prompt_has_opened_is_not_said_again(writer: ScriptedReplyWriter):
    encode = writer.tokenizer.encode
    closed = encode("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    opened = encode("<|im_start|>assistant\n<think>\n")
    assert text_of(writer, writer.write(ScriptedReply(say="yes"), closed)) == "yes<|im_end|>"
    assert (
        text_of(writer, writer.write(ScriptedReply(think="hm", say="yes"), opened)) == "hm\n</think>\n\nyes<|im_end|>"
    )
    assert text_of(writer, writer.write(ScriptedReply(say="yes"), opened)) == "\n</think>\n\nyes<|im_end|>"


def test_raw_turns(writer: ScriptedReplyWriter):
    assert writer.write(ScriptedReply(ids=(3, 2, 1)), []) == [3, 2, 1]
    assert text_of(writer, writer.write(ScriptedReply(text="<tool_call>{", end=False), [])) == "<tool_call>{"
    assert text_of(writer, writer.write(ScriptedReply(say="yes", end=False), [])).endswith("yes")


@given(st.text(max_size=40), st.sampled_from(["bytes", "odd"]))
def test_odd_splits_give_the_same_text(writer: ScriptedReplyWriter, text: str, split: Any):
    usual = writer.write(ScriptedReply(text=text), [])
    odd = writer.write(ScriptedReply(text=text, split=split), [])
    assert text_of(writer, odd) == text_of(writer, usual)
    assert len(odd) >= len(usual)


# Continuity

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(st.integers(0, 6), TOKENS, TOKENS), min_size=1, max_size=12))
def test_a_prompt_extends_the_longest_context_that_it_begins_with(steps: list[tuple[int, list[int], list[int]]]):
    """Each step either continues an earlier call or begins with tokens of its own."""
    journal = Journal()
    for back, new, output in steps:
        known = list(journal.entries)
        start = [] if back >= len(known) else [*known[back].prompt_ids, *known[back].output]
        entry = journal.begin("id", "s", [*start, *new])
        entry.output += output
        prompt = entry.prompt_ids
        contexts = [[*other.prompt_ids, *other.output] for other in known]
        begun = [len(context) for context in contexts if prompt[: len(context)] == context]
        assert entry.extends is (None if not known else bool(begun))
        if begun:
            assert entry.shared == max(begun)


async def test_sessions_do_not_share_contexts():
    journal = Journal()
    first = journal.begin("1", "a", [1, 2])
    first.output += [3]
    assert journal.begin("2", "b", [1, 2, 3, 4]).extends is None
    assert journal.begin("3", "a", [1, 2, 3, 4]).extends is True
    broken = journal.begin("4", "a", [1, 2, 9])
    assert (broken.extends, broken.shared, broken.parent) == (False, 2, 0)


def test_the_journal_forgets_the_oldest():
    journal = Journal(keep=2)
    for token in range(4):
        journal.begin(str(token), "s", [token])
    assert [entry.id for entry in journal.entries] == ["2", "3"]


# Served


async def completion(http: aiohttp.ClientSession, engine: ScriptedEngine, prompt: list[int], session: str = "s") -> Any:
    body = {"model": "m", "prompt": prompt, "max_tokens": 500, "return_token_ids": True, "session_id": session}
    async with http.post(engine.url + "/v1/completions", json=body) as reply:
        answer = await reply.json()
        return answer["choices"][0] if reply.status == 200 else answer


async def test_rules_and_turns_are_chosen_by_lineage(http: aiohttp.ClientSession, writer: ScriptedReplyWriter):
    script = Script(
        rules=(
            Rule(last="summarise", turns=(ScriptedReply(say="summary"),)),
            Rule(when="files", turns=(ScriptedReply(say="one"), ScriptedReply(say="two"))),
            Rule(when="words", turns=(ScriptedReply(say="three"),)),
        )
    )
    encode = writer.tokenizer.encode
    async with ScriptedEngine(script, FOLDER) as engine:

        async def ask(prompt: list[int]) -> tuple[str, list[int]]:
            choice = await completion(http, engine, prompt)
            said = text_of(writer, choice["token_ids"]).removeprefix("<think>\n\n</think>\n\n")
            return said.removesuffix("<|im_end|>"), [*prompt, *choice["token_ids"]]

        start = encode("count the files")
        first, context = await ask(start)
        again, _ = await ask(start)
        second, context = await ask([*context, *encode("words")])
        last, _ = await ask([*context, *encode("go on")])
        summary, _ = await ask([*context, *encode("summarise")])
        other, _ = await ask(encode("count the words"))
        refused = await completion(http, engine, encode("nothing"))
    assert [first, again, second, last, summary, other] == ["one", "one", "two", "Done.", "summary", "three"]
    assert "no rule of the script fits" in refused["error"]["message"]


async def test_a_rule_may_count_by_session(http: aiohttp.ClientSession, writer: ScriptedReplyWriter):
    script = Script(
        rules=(
            Rule(turns=(ScriptedReply(ids=(1,)), ScriptedReply(ids=(2,)), ScriptedReply(ids=(3,))), count="session"),
        )
    )
    async with ScriptedEngine(script, FOLDER) as engine:
        said = [(await completion(http, engine, prompt))["token_ids"] for prompt in ([5], [6], [7])]
        elsewhere = (await completion(http, engine, [8], session="other"))["token_ids"]
    assert said == [[1], [2], [3]]
    assert elsewhere == [1]


async def test_a_function_may_reply(http: aiohttp.ClientSession, writer: ScriptedReplyWriter):
    asked: list[Prompt] = []

    def reply(prompt: Prompt) -> ScriptedReply | str:
        asked.append(prompt)
        return ScriptedReply(ids=(1, 2)) if prompt.turn == 0 else "done"

    check: ReplyFunction = reply
    async with ScriptedEngine(check, FOLDER) as engine:
        start = writer.tokenizer.encode("hello")
        await completion(http, engine, start)
        await completion(http, engine, [*start, 1, 2, *writer.tokenizer.encode(" you")])
    assert [prompt.turn for prompt in asked] == [0, 1]
    assert [prompt.last for prompt in asked] == ["hello", " you"]
    assert asked[1].text == "hello" + text_of(writer, [1, 2]) + " you"


async def test_the_log_says_what_continues_what(http: aiohttp.ClientSession):
    async with ScriptedEngine(say(ScriptedReply(ids=(7, 8))), FOLDER) as engine:
        for prompt in ([1, 2], [1, 2, 7, 8, 3], [1, 9]):
            await completion(http, engine, prompt)
        async with http.get(engine.url + "/scripted/log") as reply:
            log = await reply.json()
        async with http.get(engine.url + "/scripted/log?first=1") as reply:
            later = await reply.json()
    assert (later["count"], later["requests"]) == (3, log["requests"][1:])
    assert log["broken"] == 1
    assert [entry["extends"] for entry in log["requests"]] == [None, True, False]
    assert log["requests"][1] == {
        "index": 1,
        "id": "",
        "session": "s",
        "prompt_ids": [1, 2, 7, 8, 3],
        "output_ids": log["requests"][1]["output_ids"],
        "parent": 0,
        "extends": True,
        "shared": 4,
        "rule": 0,
        "turn": 1,
        "outcome": "finished",
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "must be an object"),
        (b"{}", "prompt must be a list"),
        (b'{"prompt": [1, -1]}', "prompt must be a list"),
        (b'{"prompt": "text"}', "prompt must be a list"),
        (b'{"prompt": [1], "temperature": "hot"}', "temperature must be a number"),
        (b'{"prompt": [1], "max_tokens": 1.5}', "max_tokens must be an integer"),
    ],
)
async def test_bad_bodies_are_refused_by_name(http: aiohttp.ClientSession, body: bytes, words: str):
    async with (
        ScriptedEngine(STUB, FOLDER) as engine,
        http.post(engine.url + "/v1/completions", data=body) as reply,
    ):
        assert reply.status == 400
        assert words in (await reply.json())["error"]["message"]


async def test_two_engines_say_the_same(http: aiohttp.ClientSession):
    said = []
    for _ in range(2):
        async with ScriptedEngine(say(ScriptedReply(say="hello there", split="odd")), FOLDER) as engine:
            said.append(await completion(http, engine, [1, 2, 3]))
    assert said[0] == said[1]
