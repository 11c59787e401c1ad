"""`python -m rolltap.engine.scripted --script FILE --tokenizer DIR`: a scripted engine as a process of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rolltap.engine.scripted.script import STUB, load_script
from rolltap.engine.scripted.server import CONTEXT, ScriptedEngine, ServedModel
from rolltap.errors import ConfigError


def run(
    tokenizer: Annotated[Path, typer.Option(help="A folder with tokenizer.json and tokenizer_config.json.")],
    script: Annotated[Path | None, typer.Option(help="TOML, JSON or Python; without it, 256 bytes of reply.")] = None,
    wire: Annotated[str, typer.Option(help="Server to imitate: vllm, vllm-completions, sglang, ...")] = "vllm",
    family: Annotated[str, typer.Option(help="The tokenizer's family, by its name in `renderers`.")] = "qwen3",
    name: Annotated[str, typer.Option(help="Model name in requests.")] = "scripted",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one, printed on the first line.")] = 8101,
    context: Annotated[int, typer.Option(help="Longest sequence in tokens.")] = CONTEXT,
    keep: Annotated[int, typer.Option(help="Requests kept for /scripted/log; 0 checks and keeps none.")] = 20_000,
) -> None:
    """Serves a script by token ids."""
    try:
        loaded = STUB if script is None else load_script(script)
        served = ServedModel(name, context=context)
        engine = ScriptedEngine(loaded, tokenizer, wire=wire, family=family, served=served, keep=keep)
        engine.run(host, port, os.environ.get("ROLLTAP_ENGINE_KEY", ""))
    except ConfigError as error:
        sys.exit(f"rolltap engine: {error}")


if __name__ == "__main__":
    typer.run(run)
