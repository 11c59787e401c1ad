"""`python -m rolltap.engine.tiny.make OUT --seed S`: makes the tiny model from nothing but this repository.

Trains the tokenizer, initialises the network, warm-starts it, and writes a Hugging Face folder: `config.json`,
`generation_config.json`, `tokenizer.json`, `tokenizer_config.json` (with the chat template) and `model.safetensors`.
The committed `weights/` are what seed 0 gave; it takes about fifteen minutes on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import jinja2
import torch
import typer
from rich.console import Console
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from rolltap.engine.tiny import tokenizer as tiny
from rolltap.engine.tiny.tasks import MINI_SWE_AGENT
from rolltap.engine.tiny.warm_start import SHORT, WHOLE, warm_start


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
