"""`python -m rolltap.engine.tiny.make OUT --seed S`: makes the tiny model from nothing but this repository.

Trains the tokenizer, initialises the network, warm-starts it, and writes a Hugging Face folder: `config.json`,
`generation_config.json`, `tokenizer.json`, `tokenizer_config.json` (with the chat template) and `model.safetensors`.
The committed `weights/` are what seed 0 gave; it takes about fifteen minutes on two cores.

The warm start is supervised episodes that teach how to act, and mostly not what to do. Each episode is a real run in a
real folder. Its command has the instruction's names in the right places, but it is the command asked for in a minority
of episodes only: half of them show the command of another kind, the same one each time. So the warm model calls the
tool, copies names, reads the answer and submits, and has the wrong habit for every kind of instruction. What it gets
right is left to be reinforced by reward.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import jinja2
import torch
import typer
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltap.engine.tiny import tokenizer as tiny
from rolltap.engine.tiny.tasks import KINDS, MINI_SWE_AGENT, SUBMIT, TinyTask, make_task

RIGHT_SHARE = 0.25  # of episodes show the right command; what the shares leave shows any of the same arity
HABIT_SHARE = 0.5  # of episodes show the command of the next kind of the same arity
LOOK_SHARE = 0.1  # of episodes look at the folder first
QUIT_SHARE = 0.1  # of episodes submit without acting


@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """How long and how fast the warm start learns."""

    episodes: int
    steps: int
    learning_rate: float
    batch: int = 64
    warm_up: int = 50


SHORT = WarmStartSettings(episodes=12_000, steps=400, learning_rate=3e-3)
"""Without the system turn, whose tokens would be three quarters of the work."""
WHOLE = WarmStartSettings(episodes=8_000, steps=250, learning_rate=1.5e-3)
"""On whole conversations."""


@dataclass(frozen=True, slots=True)
class Episode:
    """A conversation: the instruction, then commands with what the shell answered to each but the last."""

    instruction: str
    commands: tuple[str, ...]
    answers: tuple[str, ...]


def run_episode(seed: int) -> Episode:
    """One seeded episode, run for real."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    task = make_task(kind, str(seed), rng, "all")
    same = [other for other in KINDS if other.arity == kind.arity]
    habit = same[(same.index(kind) + 1) % len(same)]
    shares = (RIGHT_SHARE, HABIT_SHARE, 1.0 - RIGHT_SHARE - HABIT_SHARE)
    (shown,) = rng.choices((kind, habit, rng.choice(same)), shares)
    commands = [task.fill(shown.command)]
    draw = rng.random()
    if draw < LOOK_SHARE:
        commands.insert(0, "ls")
    elif draw < LOOK_SHARE + QUIT_SHARE:
        commands = []
    return Episode(task.instruction, (*commands, SUBMIT), tuple(_answers(task, commands)))


def _answers(task: TinyTask, commands: list[str]) -> Iterator[str]:
    """What mini-swe-agent's observation template shows for each command."""
    with TemporaryDirectory() as folder:
        task.setup(Path(folder))
        for command in commands:
            done = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            yield f"exit {done.returncode}" + (f"\n{done.stdout.strip()}" if done.stdout else "")


def tool_call(command: str) -> str:
    """What the model samples to send `command`, without the end-of-turn token."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


def encode(episode: Episode, head: str, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of the conversation and which of them the model is to sample.

    `head` is the rendered system turn up to the instruction. The pieces end at special tokens, so encoding them one
    by one gives the same ids as encoding the whole.
    """
    ids: list[int] = []
    mask: list[bool] = []

    def put(text: str, sampled: bool) -> None:
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids.extend(piece)
        mask.extend([sampled] * len(piece))

    put(f"{head}{episode.instruction}<|im_end|>\n<|im_start|>assistant\n", False)
    for index, command in enumerate(episode.commands):
        if index:
            answer = episode.answers[index - 1]
            put(
                f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
                False,
            )
        put(tool_call(command) + "<|im_end|>", True)
    return ids, mask


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: Tokenizer, head: str, seed: str, settings: WarmStartSettings
) -> Iterator[float]:
    """Trains `model` in place and yields the loss of each step. Deterministic for a seed on one machine."""
    seeds = random.Random(seed).sample(range(2**32), settings.episodes)
    with ThreadPoolExecutor(4) as pool:
        episodes = list(pool.map(run_episode, seeds))
    encoded = [encode(episode, head, tokenizer) for episode in episodes]
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / settings.warm_up) * (1.0 - 0.95 * step / settings.steps)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(settings.steps):
        loss = _loss(model, rng.sample(encoded, settings.batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


def _loss(model: Qwen3ForCausalLM, rows: list[tuple[list[int], list[bool]]]) -> torch.Tensor:
    """Mean cross-entropy of the sampled tokens of a batch, rows padded on the right."""
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.zeros(len(rows), length, dtype=torch.long)
    mask_BT = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, (ids, mask) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        mask_BT[row, : len(ids)] = torch.tensor(mask)
    sampled = mask_BT[:, 1:]
    logits = model.lm_head(model.model(ids_BT[:, :-1]).last_hidden_state[sampled])
    return F.cross_entropy(logits, ids_BT[:, 1:][sampled])


def shape(vocabulary: int, end: int, pad: int) -> dict[str, Any]:
    """The network's `config.json`; `end` and `pad` are token ids."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": tiny.CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "eos_token_id": end,
        "pad_token_id": pad,
    }


def render(messages: list[dict[str, Any]]) -> str:
    """The prompt of `messages` with the bash tool, as transformers renders it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string(tiny.chat_template())
    return template.render(messages=messages, tools=[tiny.BASH_TOOL], add_generation_prompt=True)


def head() -> str:
    """The rendered system turn, up to where the instruction begins."""
    system = MINI_SWE_AGENT["agent"]["system_template"]
    mark = "\x00"
    return render([{"role": "system", "content": system}, {"role": "user", "content": mark}]).split(mark)[0]


def initialise(config: dict[str, Any], seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def save(model: Qwen3ForCausalLM, config: dict[str, Any], folder: Path) -> None:
    """Writes the network's part of the folder: what every release of transformers writes alike."""
    end, pad = config["eos_token_id"], config["pad_token_id"]
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": True, "temperature": 1.0}
    for name, values in (("config", config), ("generation_config", generation)):
        (folder / f"{name}.json").write_text(json.dumps(values, indent=2) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


def make(
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    seed: Annotated[int, typer.Option(help="Seeds the weights, the episodes and their order.")] = 0,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 2,
) -> None:
    """Makes the tiny model and warm-starts it."""
    torch.set_num_threads(threads)
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    start = head()
    tokenizer = tiny.train(tiny.corpus(start))
    tiny.save(tokenizer, out)
    ids = tokenizer.get_vocab()
    config = shape(tokenizer.get_vocab_size(), ids[tiny.END], ids[tiny.END_OF_TEXT])
    model = initialise(config, seed)
    for name, text, settings in (("short", tiny.USER, SHORT), ("whole", start, WHOLE)):
        for step, loss in enumerate(warm_start(model, tokenizer, text, f"{name}:{seed}", settings)):
            if step % 50 == 0 or step == settings.steps - 1:
                console.print(f"{name}  step {step:>4}  loss {loss:.4f}")
    save(model, config, out)


if __name__ == "__main__":
    typer.run(make)
