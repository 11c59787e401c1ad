"""The example of a pretrained model: its tasks can be done, its teacher does them, and its GGUF file is converted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rolltap.engine.model import CausalModel
from rolltap.engine.scripted import Prompt, ScriptedEngine
from rolltap.engine.tiny.tasks import SUBMIT, TinyTask, make_tasks

from ... import tiny_gguf
from ...harnesses.house import POLICY, Run, opened

EXAMPLE = Path(__file__).parents[3] / "examples" / "real-model"


def module(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    sys.modules.pop(name, None)
    return import_module(name)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return module("world", monkeypatch)


def told(world: ModuleType, task: TinyTask, turn: int = 0) -> str:
    text = f"<|im_start|>user\n{task.instruction}<|im_end|>\n<|im_start|>assistant\n"
    return world.reply(Prompt([], text, "", turn, "", "")).removeprefix("```bash\n").removesuffix("\n```")


def test_the_teacher_does_every_task_in_every_wording(world: ModuleType, tmp_path: Path) -> None:
    tasks = make_tasks(0, 64, "held_out", world.KINDS_OF_16)
    assert len({task.instruction.replace(task.first, "").replace(task.second, "") for task in tasks}) == 32
    assert len({task.kind.name for task in tasks}) == 16
    for task in tasks:
        folder = tmp_path / task.id
        folder.mkdir()
        task.setup(folder)
        assert task.check(folder) == 0.0, task.instruction
        subprocess.run(told(world, task), shell=True, cwd=folder, check=False)  # grep may find nothing
        assert task.check(folder) == 1.0, task.instruction
        assert told(world, task, turn=1) == SUBMIT


def test_a_teacher_that_errs_errs_always_in_the_same_tasks(world: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = make_tasks(1, 320, "train", world.KINDS_OF_16)
    right = [told(world, task) for task in tasks]
    monkeypatch.setenv("TEACHER_ERRS", "0.4")
    said = [told(world, task) for task in tasks]
    assert said == [told(world, task) for task in tasks]
    wrong = sum(one != other for one, other in zip(said, right, strict=True)) / len(tasks)
    assert 0.25 < wrong < 0.45


async def test_its_second_agent_calls_a_native_tool(
    world: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose own template knows no tools; the template beside the example writes and reads its calls."""
    tiny_gguf.write(tmp_path / "tiny.gguf")
    module("fetch", monkeypatch).convert(tmp_path / "tiny.gguf", tmp_path / "model")
    shutil.copy(EXAMPLE / "tools.jinja", tmp_path / "model" / "chat_template.jinja")
    (task,) = make_tasks(0, 1, "train", world.KINDS_OF_16)
    function: Any = {"name": "shell", "description": "Runs.", "parameters": {"type": "object", "properties": {}}}
    conversation: list[Any] = [
        {"role": "system", "content": "You work."},
        {"role": "user", "content": task.instruction},
    ]
    writer = world.TextWriter(world.ScriptTokenizer(tmp_path / "model"))
    async with (
        ScriptedEngine(world.reply, tmp_path / "model", family=writer) as engine,
        opened(engine, tmp_path, tokenizer=str(tmp_path / "model"), family="") as home,
    ):
        session = await home.open()
        async with openai.AsyncOpenAI(base_url=session.endpoint.v1, api_key=session.endpoint.key) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model=POLICY, messages=conversation, tools=[{"type": "function", "function": function}]
                )
                message = reply.choices[0].message
                conversation.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or ():
                    conversation.append({"role": "tool", "tool_call_id": call.id, "content": "exit code 0\n"})
        run = await home.read(Run(session))
    call, _, done = conversation[2:]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"command": task.fill(task.kind.command)}
    assert done["content"] == "Done."
    assert [one["break_"] for one in run.calls] == [None, None]


def test_a_gguf_file_becomes_a_folder_that_trainers_and_engines_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tiny_gguf.write(tmp_path / "tiny.gguf")
    module("fetch", monkeypatch).convert(tmp_path / "tiny.gguf", tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    for name, own in (("model.embed_tokens", "token_embd"), ("model.layers.1.mlp.down_proj", "blk.1.ffn_down")):
        assert torch.equal(saved[f"{name}.weight"], torch.from_numpy(weights[f"{own}.weight"]))
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # it is no quantised model any more
    assert network.config.tie_word_embeddings
    assert getattr(network.config, "quantization_config", None) is None
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    conversation = [{"role": "user", "content": "héllo"}]
    prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(tokenizer(prompt).input_ids) == prompt
    served = CausalModel.load(tmp_path / "model")
    ids = torch.tensor([tokenizer(prompt).input_ids])
    with torch.no_grad():
        scores = torch.cat(list(served.score(ids[0].tolist())))
        assert torch.allclose(scores, network(ids).logits[0], atol=1e-4)
