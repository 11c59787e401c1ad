"""The tiny model's tokenizer and tasks."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.qwen3 import Qwen3Renderer
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rolltap.engine.tiny import FOLDER
from rolltap.engine.tiny.make import Episode, encode, head, run_episode, tool_call
from rolltap.engine.tiny.tasks import HELD_OUT_NAMES, KINDS, MINI_SWE_AGENT, TRAIN_NAMES, make_tasks, snapshot
from rolltap.engine.tiny.tokenizer import BASH_TOOL

TOOLS: list[Any] = [BASH_TOOL]
CALL = {"type": "function", "function": {"name": "bash", "arguments": {"command": "cp apple.txt pear.txt"}}}
CONVERSATION: list[Any] = [
    {"role": "system", "content": MINI_SWE_AGENT["agent"]["system_template"]},
    {"role": "user", "content": "Copy apple.txt to pear.txt."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "exit 0"},
]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


def test_the_committed_tokenizer_is_what_the_script_makes(model_folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        assert json.loads((FOLDER / name).read_text()) == json.loads((model_folder / name).read_text()), name


@given(text=st.text())
def test_any_text_survives_the_tokenizer(text: str) -> None:
    import unicodedata

    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("turns", [2, 4])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renderers_and_the_chat_template_agree(tokenizer: Any, turns: int, tools: Any) -> None:
    renderer = Qwen3Renderer(tokenizer)
    ours = renderer.render_ids(CONVERSATION[:turns], tools=tools, add_generation_prompt=True)
    template = tokenizer.apply_chat_template(CONVERSATION[:turns], tools=tools, add_generation_prompt=True)
    assert ours == template["input_ids"]


def test_a_sampled_tool_call_parses_and_the_next_turn_extends_it(tokenizer: Any) -> None:
    renderer = Qwen3Renderer(tokenizer)
    prompt = renderer.render_ids(CONVERSATION[:2], tools=TOOLS, add_generation_prompt=True)
    output = tokenizer.encode(tool_call("cp apple.txt pear.txt") + "<|im_end|>", add_special_tokens=False)
    (call,) = renderer.parse_response(output).tool_calls
    assert (call.name, call.arguments) == ("bash", {"command": "cp apple.txt pear.txt"})
    bridged = renderer.bridge_to_next_turn(prompt, output, CONVERSATION[3:], tools=TOOLS)
    assert bridged is not None
    assert bridged.token_ids[: len(prompt) + len(output)] == prompt + output


def test_an_episode_is_encoded_as_the_chat_template_renders_it(tokenizer: Any) -> None:
    episode = Episode("Copy apple.txt to pear.txt.", ("cp apple.txt pear.txt", "ls"), ("exit 0",))
    ids, sampled = encode(episode, head(), tokenizer.backend_tokenizer)
    prompt = tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, add_generation_prompt=True)["input_ids"]
    assert ids[: len(prompt)] == prompt
    assert sampled[len(prompt) :] == [True] * (len(ids) - len(prompt))
    assert tokenizer.decode([i for i, s in zip(ids, sampled, strict=True) if s]).count("<tool_call>") == 2


def test_an_episode_is_what_really_happened() -> None:
    for seed in range(30):
        episode = run_episode(seed)
        assert episode.commands[-1] == "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        assert len(episode.answers) == len(episode.commands) - 1
        assert all(answer.startswith("exit ") for answer in episode.answers)


def test_one_command_solves_a_task_and_no_other_of_its_arity_does(tmp_path: Path) -> None:
    for task in make_tasks(seed=3, n=2 * len(KINDS), split="train"):
        for kind in KINDS:
            if kind.arity != task.kind.arity:
                continue
            folder = tmp_path / f"{task.id}-{kind.name}"
            folder.mkdir()
            task.setup(folder)
            assert task.check(folder) == 0.0
            subprocess.run(task.fill(kind.command), shell=True, cwd=folder, stderr=subprocess.DEVNULL, check=False)
            solves = kind is task.kind
            assert task.check(folder) == float(solves), (task.instruction, kind.command, snapshot(folder))


def test_tasks_repeat_by_seed_and_use_every_kind() -> None:
    first, again, other = (make_tasks(seed, 24, "train") for seed in (1, 1, 2))
    assert first == again
    assert [task.instruction for task in first] != [task.instruction for task in other]
    assert {task.kind for task in first[:8]} == set(KINDS)
    assert len({task.id for task in first}) == 24


def test_held_out_tasks_share_no_name_with_training() -> None:
    assert not set(TRAIN_NAMES) & set(HELD_OUT_NAMES)
    text = " ".join(task.instruction for task in make_tasks(0, 200, "held_out"))
    assert not any(f" {name}" in text for name in TRAIN_NAMES)
    assert all(name in text for name in HELD_OUT_NAMES)


@pytest.mark.acceptance
async def test_the_committed_model_calls_the_tool_and_mostly_with_the_wrong_command(
    start_engine: Callable[..., str], tokenizer: Any
) -> None:
    """What the demo starts from: the grammar and the names are known, the command that is asked for is not."""
    renderer = Qwen3Renderer(AutoTokenizer.from_pretrained(FOLDER))
    tasks = make_tasks(seed=11, n=96, split="held_out")
    async with aiohttp.ClientSession(start_engine(FOLDER)) as client:

        async def act(seed: int, instruction: str) -> Any:
            messages: list[Any] = [CONVERSATION[0], {"role": "user", "content": instruction}]
            ids = renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=True)
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 48, "seed": seed}}
            async with client.post("/inference/v1/generate", json=body) as reply:
                return renderer.parse_response((await reply.json())["choices"][0]["token_ids"])

        replies = await asyncio.gather(*(act(seed, task.instruction) for seed, task in enumerate(tasks)))
    commands = [[call.arguments.get("command") for call in reply.tool_calls] for reply in replies]
    assert sum(len(sent) == 1 for sent in commands) >= 0.95 * len(tasks)
    right = sum(sent == [task.fill(task.kind.command)] for sent, task in zip(commands, tasks, strict=True))
    assert 0.1 < right / len(tasks) < 0.45
