"""tinker-cookbook's recipes as they are, on `rolltap tinker`; what they would download is in the folder they run in."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import tinker
from tokenizers import Tokenizer

from rolltap.engine.tiny import FOLDER
from rolltap.trainer_client.endpoint.saved import folder_of

from ..conftest import ROOT

PYTHON = ROOT / ".cache" / "trainers" / "tinker-cookbook-0.5.8" / "bin" / "python"
MODEL = "Qwen/Qwen3-8B"
"""The tiny model's name for the recipes: one that they have a renderer for."""

IN_A_BOX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOWN = (
    f"How many r's are in strawberry?{IN_A_BOX}<|im_end|>\n<|im_start|>assistant\n"
    "Let's spell the word out and number all the letters: "
    "1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}"
    "<|im_end|>\n<|im_start|>user\n"
)
"""What `rl_loop` puts behind and before a question."""

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(400)]


@dataclass(frozen=True, slots=True)
class Workshop:
    """A running service, and the folder that recipes run in. `out` is the service's `--out`."""

    folder: Path
    out: Path
    variables: dict[str, str]

    def run(self, recipe: str, **options: object) -> list[dict[str, Any]]:
        """Runs a recipe to its end; its metrics by step. Its logs are in the folder's `log_path`."""
        arguments = [f"{name}={value}" for name, value in options.items()]
        command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", *arguments]
        done = subprocess.run(
            command, cwd=self.folder, env=self.variables, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return read_lines(self.folder / str(options["log_path"]) / "metrics.jsonl")

    def last_saved(self, log: str) -> dict[str, Any]:
        return read_lines(self.folder / log / "checkpoints.jsonl")[-1]


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def turns(*contents: str) -> dict[str, Any]:
    """A conversation that a user begins."""
    return {"messages": [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(contents)]}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder, out = tmp_path_factory.mktemp("recipes"), tmp_path_factory.mktemp("service")
    (folder / MODEL).parent.mkdir()
    (folder / MODEL).symlink_to(FOLDER)
    command = [sys.executable, "-m", "rolltap", "tinker", "--model", str(FOLDER), "--out", str(out), "--name", MODEL]
    calm = {**os.environ, "OMP_NUM_THREADS": "1"}  # of two threads, each waits for the other where cores are busy
    command += ["--port", "0", "--models", "8"]  # no recipe closes its client: each is forgotten a minute after its end
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=calm) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline().removeprefix("export ").strip() for _ in range(2)]
            addressed = dict(line.split("=", 1) for line in lines)
            offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
            yield Workshop(folder, out, {**calm, **offline, **addressed})
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def taught(workshop: Workshop) -> dict[str, Any]:
    """The checkpoint of supervised training on sums. Taught this long, the model ends about 60% of its answers to the
    cookbook's arithmetic; a fifth, as after 25 steps, is too few for eight steps of RL to rise from each time."""
    numbers = random.Random(0)
    sums = [(numbers.randint(0, 100), numbers.randint(0, 100)) for _ in range(280)]
    shots = [turns("What is 4 + 5?", "9", f"What is {one} + {other}?", str(one + other)) for one, other in sums]
    write_lines(workshop.folder / "sums.jsonl", shots)
    losses = workshop.run(
        "chat_sl.train",
        dataset="sums.jsonl",
        renderer_name="role_colon",
        train_on_what="last_assistant_message",
        learning_rate=3e-3,
        batch_size=8,
        max_length=512,
        max_steps=35,
        log_path="taught",
    )
    assert losses[-1]["train_mean_nll"] < losses[0]["train_mean_nll"] / 3
    return workshop.last_saved("taught")


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": 1e-3, "max_steps": 8},
        # samples that are two steps old bear smaller steps: with 1e-3, one run of three ended below its start
        {"learning_rate": 3e-4, "max_steps": 14, "max_steps_off_policy": 2},
    ],
    ids=["in turns", "asynchronous"],
)
def test_what_was_taught_is_reinforced(workshop: Workshop, taught: dict[str, Any], options: dict[str, float]) -> None:
    """RL on the cookbook's arithmetic from the taught state, of which it learns the renderer; asynchronously, agents
    sample while it trains. The reward is for ending with the stop string first: the tiny model can't add."""
    log = f"reinforced{len(options)}"
    reinforced = workshop.run(
        "math_rl.train",
        load_checkpoint_path=taught["state_path"],
        groups_per_batch=8,
        group_size=8,
        max_tokens=12,
        eval_every=0,
        log_path=log,
        **options,
    )
    assert json.loads((workshop.folder / log / "config.json").read_text())["renderer_name"] == "role_colon"
    rewards = [step["env/all/reward/total"] for step in reinforced]
    assert mean(rewards[-3:]) > mean(rewards[:3]), rewards
    after = workshop.last_saved(log)
    ended = [ended_samples(workshop, path) for path in (None, taught["sampler_path"], after["sampler_path"])]
    assert ended[0] == 0
    assert ended[2] > ended[1] + 10, ended
    weights = [folder_of(workshop.out, one["sampler_path"]) / "model.safetensors" for one in (taught, after)]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def ended_samples(workshop: Workshop, path: str | None) -> int:
    """How many of 64 samples of saved weights, or the base model's, end with the renderer's stop string."""
    service = tinker.ServiceClient(
        base_url=workshop.variables["TINKER_BASE_URL"], api_key=workshop.variables["TINKER_API_KEY"]
    )
    sampler = service.create_sampling_client(path, None if path else MODEL).result()
    text = "User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is 7 + 12?\n\nAssistant:"
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    prompt = tinker.ModelInput.from_ints(tokenizer.encode(text).ids)
    params = tinker.SamplingParams(max_tokens=12, stop=["\n\nUser:"], seed=0)
    samples = sampler.sample(prompt, 64, params).result().sequences
    service.close("success").result()
    return sum(tokenizer.decode(sample.tokens).endswith("\n\nUser:") for sample in samples)


def test_preferences_are_learnt(workshop: Workshop, taught: dict[str, Any]) -> None:
    """DPO from the taught state, whose sampler gives the reference's log-probs: at first they are the policy's own."""
    pairs = [
        {name: f"\n\nHuman: What is {one} + {one}?\n\nAssistant: {answer}" for name, answer in answers.items()}
        for one in range(128)
        for answers in ({"chosen": str(2 * one), "rejected": "That is for you to say."},)
    ]
    for part in ("train", "test"):
        write_lines(workshop.folder / "Anthropic" / "hh-rlhf" / f"{part}.jsonl", pairs)
    steps = workshop.run(
        "preference.dpo.train",
        dataset="hhh",
        load_checkpoint_path=taught["state_path"],
        renderer_name="role_colon",
        learning_rate=1e-3,
        batch_size=16,
        log_path="preferred",
    )
    assert steps[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert steps[-1]["accuracy"] == 1.0
    assert steps[-1]["margin"] > 1.0, steps


def test_the_two_loops_in_one_file_each(workshop: Workshop) -> None:
    """`sl_loop` teaches the answers 2 and 3 in a box. `rl_loop` goes on from there, in the same log, and rewards 2."""
    answers = [turns(f"{SHOWN}What is {one} times 1?{IN_A_BOX}", f"\\boxed{{{2 + one % 2}}}") for one in range(240)]
    write_lines(workshop.folder / "HuggingFaceH4" / "no_robots" / "train.jsonl", answers)
    questions = [{"question": f"What is {one} times 1?", "answer": "#### 2"} for one in range(400)]
    write_lines(workshop.folder / "openai" / "gsm8k" / "train.jsonl", questions)
    card = "---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n"
    (workshop.folder / "openai" / "gsm8k" / "README.md").write_text(card)
    taught = workshop.run("sl_loop", batch_size=4, learning_rate=3e-3, save_every=0, log_path="loops")
    assert taught[-1]["train_mean_nll"] < taught[0]["train_mean_nll"] / 3
    reinforced = workshop.run(
        "rl_loop", batch_size=4, group_size=8, max_tokens=20, learning_rate=5e-4, max_steps=80, log_path="loops"
    )
    rewards = [step["reward/total"] for step in reinforced if "reward/total" in step]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1, rewards
