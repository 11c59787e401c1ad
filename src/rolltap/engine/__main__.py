"""`python -m rolltap.engine --model DIR`: the embedded engine as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rolltap.engine.server import ModelServerSettings, main
from rolltap.errors import ConfigError


def run(
    model: Annotated[Path, typer.Option(help="A Hugging Face folder: config.json, tokenizer.json, *.safetensors.")],
    name: Annotated[str, typer.Option(help="Model name that requests use; empty: the folder's name.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free port. The first line of output is the URL.")] = 8100,
    slots: Annotated[int, typer.Option(help="Number of requests sampled together.")] = 32,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
    context: Annotated[int, typer.Option(help="Longest sequence in tokens; 0: the model's limit.")] = 0,
    key: Annotated[str, typer.Option(help="Key that clients send.", envvar="ROLLTAP_ENGINE_KEY")] = "",
    device: Annotated[str, typer.Option(help="torch's device; auto: a CUDA card where there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: bfloat16 on a card.")] = "auto",
) -> None:
    """Serves a model by token ids."""
    try:
        main(ModelServerSettings(model, name, host, port, slots, threads, context, key, device, dtype))
    except ConfigError as error:
        sys.exit(f"rolltap engine: {error}")


if __name__ == "__main__":
    typer.run(run)
